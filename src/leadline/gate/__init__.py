"""The scale gate: phases, evidence, lock."""

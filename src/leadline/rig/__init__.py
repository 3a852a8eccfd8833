"""The rig: checkpoint index, tiers and plan, disk stream, layer pass, schedules."""

"""What both jobs share: hashes, ledger, lock, manifest, budget arithmetic. No torch here."""

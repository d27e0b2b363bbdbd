"""The ledger of a run: which samples every step really used, and the check that it was each id once an epoch."""

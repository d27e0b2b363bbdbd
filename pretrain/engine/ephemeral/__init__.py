"""Ephemeral checkpoints: the state of every few steps, in the memory of the hosts that train, for a fast restart.

They have the format of the permanent ones and are written by the same code. Each host keeps what its ranks wrote and a
copy of what the ranks of the host before it wrote, so one lost host loses nothing.
"""

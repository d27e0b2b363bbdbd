"""Local checkpoints: the state of every few steps, in the memory of the hosts that train, for a fast restart.

They have the format of the checkpoints in the run folder and are written by the same code. Each host keeps the files of
its own ranks and a replica of the files of the previous host, so that the loss of one host loses no state.
"""

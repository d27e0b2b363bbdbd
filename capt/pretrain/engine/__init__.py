"""Parts that are the same for any model: loop, task protocol, engines, checkpoints, callbacks."""

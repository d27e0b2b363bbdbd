"""The generator of negatives: its softmax over a vocabulary that is divided over ranks, its rewards, its updates."""

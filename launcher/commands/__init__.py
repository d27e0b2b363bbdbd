"""The verbs of ``capt``, a file a subject. Their modules import next to nothing; the functions import what they use."""

"""The verbs of ``capt``, one file for each subject. Functions import what they use when they run, so help is fast."""

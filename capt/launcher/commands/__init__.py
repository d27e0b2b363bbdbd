"""The commands of ``capt``, one file a subject. Functions import what they use when they run, so help is fast."""

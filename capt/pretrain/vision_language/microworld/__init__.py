"""A synthetic world of scenes, captions and questions with known answers, in the official file formats."""

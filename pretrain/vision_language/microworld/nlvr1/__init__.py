"""Scenes of NLVR v1's kind, and statements about them in the manner of its writers, whose truth is computed."""

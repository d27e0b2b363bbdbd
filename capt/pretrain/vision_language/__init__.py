"""The task ``capt_vl``: LXMERT under its own objectives and the CAPT loss."""

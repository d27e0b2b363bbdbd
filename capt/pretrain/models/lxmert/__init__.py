"""LXMERT (Tan and Bansal 2019): the encoder, its heads, and the names of its parameters elsewhere."""

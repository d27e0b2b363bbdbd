"""Sentences, questions and answers about pictures: the official files, LXMERT's, and answer tables."""

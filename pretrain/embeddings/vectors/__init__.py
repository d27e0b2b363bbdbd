"""Files of word vectors: word2vec's text and binary form, GloVe's text form, each also packed with gzip."""

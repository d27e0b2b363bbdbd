"""Text to corrupted windows of token ids: corpora, token shards, packing, order, and corruption."""

"""Text to token shards, and the loader that reads them."""

"""Output layer, loss and input embedding whose vocabulary rows are spread over the ranks of a process group."""

from slimpipe.vocabulary.embedding import VocabularyEmbedding
from slimpipe.vocabulary.head import VocabularyHead
from slimpipe.vocabulary.shards import shard_rows

__all__ = ["VocabularyEmbedding", "VocabularyHead", "shard_rows"]

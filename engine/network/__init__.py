"""Parts of a backbone: activation sites, attention, rotary embeddings, conditions and patches."""

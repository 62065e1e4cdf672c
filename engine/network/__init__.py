"""What is inside a backbone: activation sites, attention, rotary embeddings, conditions and patches."""

"""DeepSeek-V4.1: configuration, checkpoint, layers and draft stages."""

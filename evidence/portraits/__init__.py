"""Evidence about the portraits model: training, attribute classifier, claims, report section."""

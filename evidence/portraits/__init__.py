"""Evidence about the portraits model: how it was made, the network that reads its pictures, claims, report section."""

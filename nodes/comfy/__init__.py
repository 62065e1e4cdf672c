"""The only folder that knows ComfyUI's insides. Everything above it speaks the engine's terms."""

"""The only folder that knows the inside of ComfyUI. Everything above it speaks engine terms."""

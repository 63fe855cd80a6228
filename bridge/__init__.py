"""What comes from other frameworks: torch modules and ONNX files become programs."""

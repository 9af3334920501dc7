"""Early-exit inference: in torch (`classifier`), or from an ONNX bundle with NumPy and onnxruntime (`onnx`)."""

"""Nets that really stop early: in torch (`classifier`), or from an ONNX bundle with numpy and onnxruntime (`onnx`)."""

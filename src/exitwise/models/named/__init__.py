"""Networks of timm, torchvision and Hugging Face Transformers by name, with their preprocessing."""

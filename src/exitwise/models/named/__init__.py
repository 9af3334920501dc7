"""Networks of timm, torchvision and Hugging Face Transformers by name, with the preprocessing that they were made for."""

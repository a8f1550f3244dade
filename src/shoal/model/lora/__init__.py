"""Adapters of low rank (LoRA, arXiv 2106.09685): from the files of peft and llama.cpp to what runs beside a model."""

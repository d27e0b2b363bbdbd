"""Fine-tuning on pictures and text: VQA, GQA and NLVR2."""

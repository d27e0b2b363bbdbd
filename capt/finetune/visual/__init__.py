"""Fine-tuning on pictures and text: VQA, GQA, NLVR2 and NLVR v1."""

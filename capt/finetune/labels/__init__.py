"""The task ``labels``: a pretrained encoder fine-tuned on labelled texts of one's own."""

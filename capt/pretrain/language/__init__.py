"""The ``capt_language`` job: RoBERTa under masked-language-model and CAPT losses."""

# Everything goes through .venv, so that nothing depends on what the machine has installed.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# Of make quickstart: its folder.
RUN    ?= runs/quickstart
# Of make quickstart-text: its folder.
READ   ?= runs/quickstart-text
ARGS   ?=
FUZZ   ?= 10000
# Of make quickstart-text: what is searched in the text, which is code's or the user's own.
QUERIES ?= $(if $(FILES)$(findstring data.,$(ARGS)),"she opened the door and went out" "how much does it cost" \
	"it is the law of the land","return the maximum value" "open a file for reading" "raise an error if the input is wrong")
# Of make quickstart-retrieval: its folder, a BEIR folder (without one, the text of CAPT_DATA, else docstrings of the installed
# packages), keys of training on text, of both rounds on pairs and of the reranker, and rules of the negatives.
RETRIEVAL ?= runs/quickstart-retrieval
BEIR   ?= $(firstword $(patsubst %/corpus.jsonl,%,$(wildcard $(CAPT_DATA)/retrieval/*/corpus.jsonl)))
READING ?= schedule.max_steps=200
FIRST  ?= schedule.max_steps=150
SECOND ?= schedule.max_steps=80
MINING ?= --number 2 --last 30 --relative-margin 0.05
RERANKING ?= schedule.epochs=2
# Of make quickstart-distil: its folder, the teacher (without one, the model of make quickstart), the number of
# texts, the layers of the student (the first and the last), and keys of training.
DISTIL ?= runs/quickstart-distil
TEACHER ?=
TAUGHT ?= 5000
LAYERS ?= $(if $(TEACHER),0$(comma)-1,0)
DISTILLING ?= schedule.epochs=2.5
comma  := ,
# Of these: how far the docstrings are read.
PROGRESS := progress=lambda done, files: done % 5000 and done < files or print(f'{done:,} of {files:,} Python files read', flush=True)
# Of make quickstart-vl: its folder, its size, and keys for pretraining and fine-tuning.
VL     ?= runs/quickstart-vl
PICTURES ?= 2500
PRETRAINING ?= schedule.stop_after=400
FINETUNING  ?= model.dropout=0 model.attention_dropout=0 optimizer.lr=5.0e-4
EPOCHS_VQA   ?= 3
EPOCHS_GQA   ?= 3
EPOCHS_NLVR2 ?= 4
WORKERS ?= 2
KILLS   ?= 1000
WHEELHOUSE ?= wheelhouse
# Of make wheel: the release of the tool that checks it.
TWINE  := 7.0.0
# Of make sbom: the Python whose packages are listed, and the list.
OF      ?= $(BIN)/python
SBOM    ?= build/sbom.json
# Of make test-floor: its environment.
FLOOR   ?= build/floor
# Of make test-newest: its environment.
NEWEST  ?= build/newest

# CAPT_DATA may name a folder of the user's own text; without it the docstrings of the installed packages are the corpus.
TEXT   := $(if $(CAPT_DATA),$(if $(wildcard $(CAPT_DATA)/corpus),$(CAPT_DATA)/corpus,$(CAPT_DATA)))
FILES  := $(if $(TEXT),$(wildcard $(TEXT)/*.txt $(TEXT)/*.txt.gz $(TEXT)/*.jsonl $(TEXT)/*.jsonl.gz $(TEXT)/*.parquet))
comma  := ,
space  := $(subst ,, )
DATA   := $(if $(FILES),data.files=[$(subst $(space),$(comma),$(strip $(FILES)))])

# What pip builds an editable install with (pyproject.toml, build-system).
BUILD  := pip setuptools wheel

FAULTS := $(addprefix tests/,$(addprefix multihost/test_,faults.py slurm.py sweep.py) sweep e2e/test_kills.py) \
	$(addprefix tests/distributed/test_,pods.py supervision.py meeting.py local.py ledger.py replicas.py stores.py) \
	$(addprefix tests/unit/,launcher/test_nodes.py launcher/test_gathering.py launcher/test_local.py base/test_cache.py)

.PHONY: install wheelhouse quickstart quickstart-text quickstart-vl quickstart-retrieval quickstart-distil wheel test test-core test-gpu test-floor test-newest slow fuzz faults soak check format docs bench sbom kenlm clean
.DEFAULT_GOAL := help
# Where an image sets it, every process would compile each file again, and rewrite the assertions of each test.
unexport PYTHONDONTWRITEBYTECODE

help:
	@echo "make install     .venv with everything pinned"
	@echo "make wheelhouse  all of its packages as wheels in a folder, for hosts without a network (WHEELHOUSE=wheelhouse)"
	@echo "make quickstart  a search over Python's library: train on 2 processes, resume, measure beside BM25, export, ask, report"
	@echo "make quickstart-text  the same for text alone: docstrings, or the text of CAPT_DATA"
	@echo "make quickstart-vl  the same for pictures and words, on a synthetic world: store, pretraining, VQA, GQA, NLVR2"
	@echo "make quickstart-retrieval  documents and no pairs: BM25, random weights, text, pairs, mined negatives, a reranker and back"
	@echo "make quickstart-distil  a small model learns a large one's vectors of the packages' docstrings (TEACHER=, or make quickstart's)"
	@echo "make test        what runs without a GPU, shared by two workers (WORKERS=2)"
	@echo "make test-core   the same of the core: without pictures, latent variables and words"
	@echo "make slow        the long forms of tests, which make test leaves out"
	@echo "make test-gpu    what needs a CUDA GPU"
	@echo "make test-floor  unit, parity and some distributed tests with the lowest releases that are allowed"
	@echo "make test-newest  the same with the newest releases that an index has"
	@echo "make wheel       a wheel in dist, checked by twine"
	@echo "make fuzz        thousands of hostile inputs of every kind (FUZZ=10000), about an hour"
	@echo "make faults      the fault tests alone: processes, hosts, disks and memories that fail, about five minutes"
	@echo "make soak        processes of supervised jobs are killed a thousand times (KILLS=1000), about half an hour"
	@echo "make check       ruff, mypy"
	@echo "make docs        build the documentation, warnings are errors"
	@echo "make bench       the benchmarks behind docs/benchmarks"
	@echo "make sbom        the packages of an environment with versions and licences, as CycloneDX (OF=.venv/bin/python)"
	@echo "make kenlm       KenLM's lmplz and query, for forward and reverse perplexity (needs cmake and Boost)"

install: $(VENV)/.installed

# The release of Python is looked at before anything is made, and that of an environment which is there: the pins are for 3.11.
PYTHON_IS_NEW_ENOUGH := -c 'import sys; sys.exit(sys.version_info < (3, 11))'

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) $(PYTHON_IS_NEW_ENOUGH) 2>/dev/null || { echo "error: the pinned packages need Python 3.11 or newer, and $(PYTHON) is" \
	    "$$($(PYTHON) --version 2>&1 | head -n 1): make install PYTHON=python3.12 (without one: docs/install.md)" >&2; exit 1; }
	@test ! -x $(BIN)/python || $(BIN)/python $(PYTHON_IS_NEW_ENOUGH) || { echo "error: the pinned packages need Python 3.11 or" \
	    "newer, and $(VENV) has $$($(BIN)/python --version 2>&1): rm -r $(VENV) && make install" >&2; exit 1; }
	@$(PYTHON) install.py $(VENV)
	@touch $@

# Of this commit, for an environment that exists; the tool has one of its own.
wheel: install
	rm -rf dist build/lib
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir dist .
	test -x build/twine/bin/twine || { $(PYTHON) -m venv build/twine && \
	    build/twine/bin/python -m pip install --quiet --disable-pip-version-check twine==$(TWINE); }
	build/twine/bin/twine check --strict dist/*.whl

# Everything that `make install` takes, for hosts without a network: DeepSpeed and fairscale come as sources alone.
wheelhouse: install
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check -c constraints.txt --wheel-dir $(WHEELHOUSE) \
	    "$$(grep "^torch==" constraints.txt)" $(BUILD) ".[all,dev,docs]"
	rm -f $(WHEELHOUSE)/capt_pretraining-*.whl
	@echo "$(WHEELHOUSE): copy it and this folder, then run there: PIP_NO_INDEX=1 PIP_FIND_LINKS=$(WHEELHOUSE) make install"

# Pairs from a text's own structure: the docstring of each installed function, and the function's name and signature.
# Searched are the functions of Python's own library, by docstrings of which none was trained on. From random weights: one
# step at a rate of nearly 0 makes the checkpoint.
quickstart: install
	rm -rf $(RUN)
	$(BIN)/python -c "from pathlib import Path; from examples.quickstart.own_structure import write_library_search; \
	    print(write_library_search(Path('$(RUN)/data'), $(PROGRESS)))"
	$(BIN)/capt pretrain mlm_tiny run.dir=$(RUN)/encoder data.files=$(RUN)/data/text.txt schedule.max_steps=1 \
	    schedule.warmup_steps=0 optimizer.lr=1.0e-12 batch.global=8 batch.micro=8 validate.samples=8
	$(BIN)/capt pretrain pairs_tiny --nproc 2 run.dir=$(RUN)/model model.init=$(RUN)/encoder \
	    data.files=$(RUN)/data/pairs.jsonl batch.micro=128 optimizer.lr=2.0e-3 \
	    validate.retrieval.folders=[$(RUN)/data/beir] schedule.stop_after=150 $(ARGS) || test $$? -eq 75
	$(BIN)/capt resume $(RUN)/model
	$(BIN)/capt convert $(RUN)/model $(RUN)/export --to sentence-transformers
	$(BIN)/capt evaluate $(RUN)/model --retrieval $(RUN)/data/beir --bm25
	tr '\n' '\0' < $(RUN)/data/queries.txt | xargs -0 $(BIN)/capt neighbors $(RUN)/export \
	    --text $(RUN)/data/library.txt --lines 50000
	@echo "what the four describe:" && cat $(RUN)/data/answers.txt
	$(BIN)/capt report $(RUN)/model --out $(RUN)/report
	@echo "report: $(RUN)/report/report.html   sentence-transformers model: $(RUN)/export"

# Text alone: the docstrings of the installed packages, or the text of CAPT_DATA.
quickstart-text: install
	$(if $(CAPT_DATA),$(if $(FILES)$(findstring data.,$(ARGS)),,$(error CAPT_DATA=$(CAPT_DATA): no .txt, .jsonl (also .gz) \
	    or .parquet file in it, nor in its folder corpus)))
	rm -rf $(READ)
	$(BIN)/capt pretrain capt_tiny --nproc 2 run.dir=$(READ) schedule.stop_after=150 $(DATA) $(ARGS) || test $$? -eq 75
	$(BIN)/capt resume $(READ)
	$(BIN)/capt convert $(READ) $(READ)/export/hf --to hf
	$(BIN)/capt convert $(READ) $(READ)/export/sentence-transformers --to sentence-transformers --pooling mean
	$(BIN)/capt neighbors $(READ)/export/sentence-transformers --run $(READ) \
	    --lines 20000 $(QUERIES)
	$(BIN)/capt report $(READ) --out $(READ)/report
	@echo "report: $(READ)/report/report.html   Hugging Face model: $(READ)/export/hf"

# Pictures and words on the synthetic microworld: $(VL)/world is made by a program, and every answer in it is known.
WORLD  := $(VL)/world
STORE  := data.regions=$(VL)/store
TUNED  := --nproc 2 $(STORE) batch.micro=16 $(FINETUNING)

quickstart-vl: install
	rm -rf $(VL)
	$(BIN)/capt regions microworld --out $(WORLD) --pictures $(PICTURES)
	$(BIN)/capt regions import $(WORLD)/pictures/*.tsv $(WORLD)/nlvr2/*.tsv --out $(VL)/store
	$(BIN)/capt regions inspect $(VL)/store --picture COCO_train2014_000000000001 --draw $(VL)/boxes.png \
	    --objects $(WORLD)/objects.txt --attributes $(WORLD)/attributes.txt
	$(BIN)/capt pretrain capt_vl_microworld --nproc 2 run.dir=$(VL)/pretraining $(STORE) data.train=$(WORLD)/pretraining/train.json \
	    data.validation=$(WORLD)/pretraining/validation.json data.answers=$(WORLD)/answers.json $(PRETRAINING) $(ARGS) || test $$? -eq 75
	$(BIN)/capt resume $(VL)/pretraining
	$(BIN)/capt finetune vqa run.dir=$(VL)/vqa model.init=$(VL)/pretraining $(TUNED) data.answers=$(WORLD)/answers.json \
	    data.train=[$(WORLD)/vqa/train_questions.json,$(WORLD)/vqa/train_annotations.json] \
	    data.validation=[$(WORLD)/vqa/validation_questions.json,$(WORLD)/vqa/validation_annotations.json] schedule.epochs=$(EPOCHS_VQA)
	$(BIN)/capt evaluate $(VL)/vqa --data $(WORLD)/vqa/test_questions.json --data $(WORLD)/vqa/test_annotations.json \
	    --predictions $(VL)/vqa_test.json --out $(VL)/vqa_figures.json
	$(BIN)/capt finetune gqa run.dir=$(VL)/gqa model.init=$(VL)/vqa $(TUNED) data.answers=$(WORLD)/answers.json \
	    data.train=$(WORLD)/gqa/train_questions.json data.validation=$(WORLD)/gqa/validation_questions.json schedule.epochs=$(EPOCHS_GQA)
	$(BIN)/capt evaluate $(VL)/gqa --data $(WORLD)/gqa/test_questions.json \
	    --predictions $(VL)/gqa_test.json --out $(VL)/gqa_figures.json
	$(BIN)/capt finetune nlvr2 run.dir=$(VL)/nlvr2 model.init=$(VL)/vqa $(TUNED) \
	    data.train=$(WORLD)/nlvr2/train.json data.validation=$(WORLD)/nlvr2/validation.json schedule.epochs=$(EPOCHS_NLVR2)
	$(BIN)/capt evaluate $(VL)/nlvr2 --data $(WORLD)/nlvr2/test.json \
	    --predictions $(VL)/nlvr2_test.csv --out $(VL)/nlvr2_figures.json
	$(BIN)/capt convert $(VL)/pretraining $(VL)/export/hf --to hf
	$(BIN)/python -c "from transformers import LxmertForPreTraining as L; print(L.from_pretrained('$(VL)/export/hf').num_parameters(), 'parameters')"
	$(BIN)/capt report $(VL)/pretraining --out $(VL)/report
	$(BIN)/capt report $(VL)/vqa $(VL)/gqa $(VL)/nlvr2 --out $(VL)/report-tasks
	@echo "report: $(VL)/report/report.html   Hugging Face model: $(VL)/export/hf   figures on the synthetic test split: $(VL)/*_figures.json"

# Documents and no pairs, in the order that helps: text first, then pairs that the documents have themselves. From random weights,
# so that all that is learnt is learnt here: one step at a rate of nearly 0 makes the checkpoint.
SEARCH := --nproc 2 data.query_length=24 data.sequence_length=96 batch.global=128 optimizer.lr=2.0e-3 \
	schedule.warmup_steps=20 validate.every=50 validate.retrieval.folders=[$(RETRIEVAL)/data/beir]
MEASURE := --retrieval $(RETRIEVAL)/data/beir --bm25 --dims 64,32,16 --store $(RETRIEVAL)/vectors

# The circle: text, pairs, mined negatives, a reranker of them, its scores back into the encoder; a figure after each step.
quickstart-retrieval: install
	rm -rf $(RETRIEVAL)
	$(BIN)/python -c "from pathlib import Path; from examples.quickstart.own_structure import write_data; \
	    print(write_data(Path('$(RETRIEVAL)/data'), $(if $(BEIR),Path('$(BEIR)'),None), [Path(each) for each in '$(FILES)'.split()], $(PROGRESS)))"
	$(BIN)/capt pretrain mlm_tiny run.dir=$(RETRIEVAL)/random data.files=$(RETRIEVAL)/data/text.txt schedule.max_steps=1 \
	    schedule.warmup_steps=0 optimizer.lr=1.0e-12 batch.global=8 batch.micro=8 validate.samples=8 $(ARGS)
	$(BIN)/capt evaluate $(RETRIEVAL)/random $(MEASURE) --per-query $(RETRIEVAL)/random.jsonl
	$(BIN)/capt pretrain capt_text --nproc 2 run.dir=$(RETRIEVAL)/text data.files=$(RETRIEVAL)/data/text.txt \
	    validate.retrieval.folders=[$(RETRIEVAL)/data/beir] $(READING) $(ARGS)
	$(BIN)/capt evaluate $(RETRIEVAL)/text $(MEASURE) --per-query $(RETRIEVAL)/text.jsonl
	$(BIN)/capt pretrain pairs_tiny run.dir=$(RETRIEVAL)/pairs model.init=$(RETRIEVAL)/random \
	    data.files=$(RETRIEVAL)/data/pairs.jsonl $(SEARCH) $(FIRST) $(ARGS)
	$(BIN)/capt evaluate $(RETRIEVAL)/pairs $(MEASURE) --per-query $(RETRIEVAL)/pairs.jsonl
	$(BIN)/capt pretrain pairs_tiny run.dir=$(RETRIEVAL)/text-then-pairs model.init=$(RETRIEVAL)/text \
	    data.files=$(RETRIEVAL)/data/pairs.jsonl $(SEARCH) $(FIRST) $(ARGS)
	$(BIN)/capt evaluate $(RETRIEVAL)/text-then-pairs $(MEASURE) --per-query $(RETRIEVAL)/text-then-pairs.jsonl
	$(BIN)/capt mine --pairs $(RETRIEVAL)/data/pairs.jsonl --model $(RETRIEVAL)/text-then-pairs \
	    $(MINING) --store $(RETRIEVAL)/vectors --out $(RETRIEVAL)/negatives
	$(BIN)/capt pretrain pairs_tiny run.dir=$(RETRIEVAL)/mined model.init=$(RETRIEVAL)/text-then-pairs \
	    data.files=$(RETRIEVAL)/negatives/pairs.jsonl data.negatives=2 $(SEARCH) $(SECOND) $(ARGS)
	$(BIN)/capt evaluate $(RETRIEVAL)/mined $(MEASURE) --per-query $(RETRIEVAL)/mined.jsonl
	$(BIN)/capt finetune rerank --nproc 2 run.dir=$(RETRIEVAL)/reranker model.init=$(RETRIEVAL)/text-then-pairs \
	    data.train=$(RETRIEVAL)/negatives/pairs.jsonl data.negatives=2 data.sequence_length=128 optimizer.lr=5.0e-4 $(RERANKING) $(ARGS)
	$(BIN)/capt evaluate $(RETRIEVAL)/reranker --rerank $(RETRIEVAL)/data/beir --store $(RETRIEVAL)/vectors \
	    --per-query $(RETRIEVAL)/reranked.jsonl
	$(BIN)/capt mine --pairs $(RETRIEVAL)/data/pairs.jsonl --model $(RETRIEVAL)/text-then-pairs --cross-encoder $(RETRIEVAL)/reranker \
	    $(MINING) --store $(RETRIEVAL)/vectors --out $(RETRIEVAL)/scored
	$(BIN)/capt pretrain pairs_tiny run.dir=$(RETRIEVAL)/distilled model.init=$(RETRIEVAL)/text-then-pairs \
	    data.files=$(RETRIEVAL)/scored/pairs.jsonl data.negatives=2 distillation.weight=1 $(SEARCH) $(SECOND) $(ARGS)
	$(BIN)/capt evaluate $(RETRIEVAL)/distilled $(MEASURE) --per-query $(RETRIEVAL)/distilled.jsonl
	$(BIN)/capt report $(addprefix $(RETRIEVAL)/,random text pairs text-then-pairs mined reranker distilled) --out $(RETRIEVAL)/report
	@echo "report: $(RETRIEVAL)/report/report.html   mined negatives: $(RETRIEVAL)/negatives/audit.html"
	$(BIN)/capt compare $(RETRIEVAL)/pairs.jsonl $(addprefix $(RETRIEVAL)/,random.jsonl text.jsonl text-then-pairs.jsonl mined.jsonl \
	    reranked.jsonl distilled.jsonl pairs.jsonl:bm25)

# A small model learns a large one's vectors of the docstrings and signatures of the installed packages, without any label.
# A tenth of the steps of the epochs is warmup; the job's 100 steps of it would be longer than few steps (schedule.max_steps).
quickstart-distil: install
	rm -rf $(DISTIL)
	$(if $(TEACHER),,test -d $(RUN)/export || $(MAKE) quickstart)
	$(BIN)/python -c "from pathlib import Path; from examples.quickstart.own_structure import write_library_search; \
	    print(write_library_search(Path('$(DISTIL)/data'), $(PROGRESS)))"
	grep . $(DISTIL)/data/text.txt | head -n $(TAUGHT) > $(DISTIL)/taught.txt
	$(BIN)/capt encode $(DISTIL)/taught.txt $(DISTIL)/data/beir --model $(or $(TEACHER),$(RUN)/export) \
	    --out $(DISTIL)/vectors --nproc 2
	$(BIN)/capt shrink $(or $(TEACHER),$(RUN)/export) $(DISTIL)/start --layers $(LAYERS)
	$(BIN)/capt pretrain capt_distil --nproc 2 run.dir=$(DISTIL)/student model.init=$(DISTIL)/start \
	    data.files=$(DISTIL)/taught.txt distillation.vectors=$(DISTIL)/vectors batch.micro=32 optimizer.lr=3.0e-4 \
	    schedule.warmup_steps=0 validate.retrieval.folders=[$(DISTIL)/data/beir] $(DISTILLING) $(ARGS)
	$(BIN)/capt convert $(DISTIL)/student $(DISTIL)/export --to sentence-transformers
	$(BIN)/capt evaluate $(DISTIL)/student --retrieval $(DISTIL)/data/beir --store $(DISTIL)/vectors
	$(BIN)/capt evaluate $(DISTIL)/student --retrieval $(DISTIL)/data/beir --store $(DISTIL)/vectors \
	    --documents-by $(or $(TEACHER),$(RUN)/export)
	$(BIN)/capt evaluate $(or $(TEACHER),$(RUN)/export) --retrieval $(DISTIL)/data/beir --store $(DISTIL)/vectors
	@echo "student: $(DISTIL)/export   its cosine to the teacher: capt report $(DISTIL)/student --out $(DISTIL)/report"

# Each worker computes on one thread: with one a core, the threads of the workers would wait for one another.
test slow test-floor test-newest faults: export OMP_NUM_THREADS ?= 1

test: install
	$(BIN)/python -m pytest -m "not gpu and not slow" -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=50 --durations-min=1

test-core: install
	$(BIN)/python -m pytest -m "not gpu and not slow and not family" -n $(WORKERS) --dist loadfile --no-loadscope-reorder

slow: install
	$(BIN)/python -m pytest -m "slow and not gpu" -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test-gpu: install
	$(BIN)/python -m pytest -m gpu

# torch goes first here as well; test tools are those of the floor's pins, and whatever needs sweeps or ONNX is left out.
$(FLOOR)/.installed: pyproject.toml constraints-floor.txt
	test -x $(FLOOR)/bin/python || $(PYTHON) -m venv $(FLOOR)
	$(FLOOR)/bin/python -m pip install --quiet --disable-pip-version-check "$$(grep "^torch==" constraints-floor.txt)"
	$(FLOOR)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-floor.txt \
	    -e ".[train,report,export,retrieval,fairscale,vision,duplicates]" \
	    accelerate beartype hypothesis jsonschema pytest pytest-timeout pytest-xdist pytrec-eval-terrier
	touch $@

FLOOR_TESTS := $(addprefix tests/unit/,contrast engine language models) tests/parity tests/families/pictures/lxmert \
	$(wildcard tests/families/*/parity) \
	$(addprefix tests/distributed/test_,contrast_exact.py engines.py checkpoint.py language_gradients.py)

test-floor: $(FLOOR)/.installed
	$(FLOOR)/bin/python -m pytest -m "not gpu and not slow" -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(FLOOR_TESTS)

# The other end of the ranges: the newest releases that an index has, without pins but those of the test tools.
$(NEWEST)/.installed: pyproject.toml
	test -x $(NEWEST)/bin/python || $(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade --upgrade-strategy eager \
	    -e ".[train,report,export,retrieval,fairscale,vision,duplicates]" \
	    accelerate beartype hypothesis jsonschema pytest pytest-timeout pytest-xdist pytrec-eval-terrier
	touch $@

test-newest: $(NEWEST)/.installed
	$(NEWEST)/bin/python -m pytest -m "not gpu and not slow" -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(FLOOR_TESTS)

fuzz: install
	CAPT_FUZZ=$(FUZZ) $(BIN)/python -m pytest tests/fuzz tests/families/pictures/fuzz -q --timeout 7200

faults: install
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(FAULTS)

soak: install
	$(BIN)/python -m tests.kills --kills $(KILLS) $(ARGS)

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: install
	$(BIN)/mkdocs build --strict

bench: install
	$(BIN)/capt bench --out docs/benchmarks

# The tool has an environment of its own, so that it is not in the list.
sbom: install
	$(PYTHON) -m venv build/cyclonedx
	build/cyclonedx/bin/python -m pip install --quiet --disable-pip-version-check cyclonedx-bom==7.5.0
	build/cyclonedx/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --output-format JSON \
	    --output-file $(SBOM) $(OF)
	@echo "$(SBOM): packages of $(OF)"

# Optional: the estimator "builtin" needs neither program. pip install kenlm gives no trainer, but its source package
# holds one. Needs cmake, a C++ compiler and Boost; BOOST_ROOT=DIR names a Boost that is not installed system-wide.
KENLM  := build/kenlm

kenlm: $(BIN)/lmplz

$(BIN)/lmplz: | install
	rm -rf $(KENLM)
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --no-binary kenlm --dest $(KENLM) kenlm==0.3.0
	tar -xzf $(KENLM)/kenlm-0.3.0.tar.gz -C $(KENLM) --strip-components=1
	cmake -S $(KENLM) -B $(KENLM)/build -DCMAKE_BUILD_TYPE=Release >$(KENLM)/cmake.log 2>&1 || { cat $(KENLM)/cmake.log; \
	    echo "Debian and Ubuntu: apt-get install cmake g++ zlib1g-dev libbz2-dev liblzma-dev libboost-program-options-dev" \
	        "libboost-system-dev libboost-thread-dev libboost-test-dev"; exit 1; }
	cmake --build $(KENLM)/build --target lmplz query --parallel 2 >$(KENLM)/make.log 2>&1 || { tail -n 20 $(KENLM)/make.log; exit 1; }
	cp $(KENLM)/build/bin/query $(KENLM)/build/bin/lmplz $(BIN)
	@echo "built $(BIN)/lmplz and $(BIN)/query"

clean:
	rm -rf build site *.egg-info .pytest_cache .mypy_cache .ruff_cache

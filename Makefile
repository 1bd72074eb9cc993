# gpt8b. `make help` lists the targets; settings go on the command line: make BUILD=asan MPI=0 test
MAKEFLAGS += -rR
.DELETE_ON_ERROR:
.SUFFIXES:
.DEFAULT_GOAL := all

BUILD ?= release
ARCH  ?= native
V     ?= 0
MPI   ?= $(if $(shell command -v mpicc 2>/dev/null),1,0)
NVCC  ?= $(firstword $(shell command -v nvcc 2>/dev/null) $(wildcard /usr/local/cuda/bin/nvcc))
CUDA  ?= $(if $(NVCC),1,0)
CC    := gcc

Q   := $(if $(filter 1,$(V)),,@)
OUT := build/$(BUILD)$(if $(filter 0,$(MPI)),-nompi)$(if $(filter 0,$(CUDA)),-nocuda)$(if $(SANITIZE),-sanitize)

# -ffp-contract=off and no -ffast-math: the bits of a sum are part of the contract, and NaN checks must work.
WARN    := -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wno-sign-conversion -Wstrict-prototypes -Wmissing-prototypes -Werror
CFLAGS  := -std=c11 -D_GNU_SOURCE -I. $(WARN) -ffp-contract=off -fno-math-errno -g -fopenmp
LDFLAGS := -fopenmp
LDLIBS  := -linih -ljansson -lzstd -lxxhash -lm -ldl -lpthread

ifeq ($(BUILD),release)
CFLAGS += -O3 -march=$(ARCH)
else ifeq ($(BUILD),debug)
CFLAGS += -Og -march=$(ARCH) -DARENA_GUARD=1
else ifeq ($(BUILD),asan)
CFLAGS  += -O1 -march=$(ARCH) -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all -DARENA_GUARD=1
LDFLAGS += -fsanitize=address,undefined
else ifeq ($(BUILD),tsan)
# libgomp is not instrumented and gives false alarms: no OpenMP here.
CFLAGS  := $(filter-out -fopenmp,$(CFLAGS)) -O1 -march=$(ARCH) -fsanitize=thread -Wno-unknown-pragmas
LDFLAGS := $(filter-out -fopenmp,$(LDFLAGS)) -fsanitize=thread
else ifeq ($(BUILD),fuzz)
# For `make fuzz`: libFuzzer is clang's. The flags above judge gcc's warnings: -w.
CC      := clang
CFLAGS  := $(filter-out -fopenmp,$(CFLAGS)) -O1 -fno-omit-frame-pointer -fsanitize=fuzzer-no-link,address,undefined \
           -fno-sanitize-recover=all -w
LDFLAGS := -fsanitize=fuzzer,address,undefined
else
$(error BUILD=$(BUILD): expected release, debug, asan, tsan or fuzz)
endif

ifeq ($(MPI),1)
# -isystem: Open MPI's own headers do not pass our warnings.
MPI_CFLAGS := $(patsubst -I%,-isystem%,$(shell mpicc --showme:compile)) -DWITH_MPI=1
LDLIBS += $(shell mpicc --showme:link)
endif
# GPU=90a builds for one kind only, for short turns while writing.
GPU ?= 90a 100a
ifeq ($(CUDA),1)
CUDA_HOME := $(patsubst %/bin/nvcc,%,$(realpath $(NVCC)))
CFLAGS += -DWITH_CUDA=1 $(foreach g,$(GPU),-DKERNELS_$(g)=1)
LDLIBS += -L$(CUDA_HOME)/lib64 -lcudart_static -lrt -ldl -lstdc++
NVFLAGS := -std=c++17 -I. -O3 -lineinfo -Werror all-warnings -Xcompiler -Wall,-Wextra -DWITH_CUDA=1
# Kernels as compute-sanitizer can follow them (attention/sm90.cuh).
NVFLAGS += $(if $(SANITIZE),-DARRIVE_BY_LANE=1)
# Plain _cuda files run on every GPU that the project knows; _sm90 and _sm100 files are written for one.
GENCODE_cuda  := $(foreach g,$(GPU),-gencode arch=compute_$(g),code=sm_$(g))
GENCODE_sm90  := -gencode arch=compute_90a,code=sm_90a
GENCODE_sm100 := -gencode arch=compute_100a,code=sm_100a
# Kernels written for one GPU are written for its registers: a spill is an error.
NVFLAGS_sm90  := -Xptxas --warn-on-spills,--warn-on-local-memory-usage
CUDA_CFLAGS   := -isystem $(CUDA_HOME)/include
endif

ROOMS := core numerics attention model optim data dist checkpoint train
# Host code of the GPU is *_cuda.c and core/cuda.c.
SOURCES := $(filter-out train/main.c $(if $(filter 0,$(MPI)),dist/comm_mpi.c),$(foreach r,$(ROOMS),$(wildcard $(r)/*.c)))
ifneq ($(CUDA),1)
SOURCES := $(filter-out core/cuda.c %_cuda.c %_nccl.c,$(SOURCES))
endif
ifeq ($(BUILD),fuzz)
# The readers of files, and what they call.
SOURCES := $(wildcard core/status.c core/log.c core/file.c core/json.c data/shard*.c checkpoint/*.c train/config*.c \
             train/watch.c attention/recipe.c model/model_config.c optim/schedule.c)
endif
KERNELS := $(if $(filter 1,$(CUDA)),$(foreach r,$(ROOMS),$(wildcard $(r)/*.cu)))
OBJECTS := $(SOURCES:%.c=$(OUT)/%.o) $(KERNELS:%.cu=$(OUT)/%.cu.o)
LIBRARY := $(OUT)/libgpt8b.a
TOOLS   := $(patsubst tools/%.c,%,$(wildcard tools/*.c))
TESTS   := $(patsubst %.c,$(OUT)/%,$(wildcard tests/*/test_*.c))
# Tests that need a GPU are tests/ROOM/gpu_*.c.
GPU_TESTS := $(if $(filter 1,$(CUDA)),$(patsubst %.c,$(OUT)/%,$(wildcard tests/*/gpu_*.c)))
# Other files beside the tests of a room are linked into each test of that room: oracles, drivers.
# tests/faults drives the program with the driver of tests/run.
TEST_HELPERS = $(patsubst %.c,$(OUT)/%.o,$(filter-out $(wildcard $(1)/test_*.c $(1)/gpu_*.c),$(wildcard $(1)/*.c)) \
                 $(if $(filter tests/faults/,$(1)),tests/run/program.c))
FUZZERS := $(patsubst %.c,$(OUT)/%,$(wildcard tests/fuzz/fuzz_*.c))
BENCHES := $(patsubst %.c,$(OUT)/%,$(filter-out $(if $(filter 0,$(CUDA)),bench/%_cuda.c),$(wildcard bench/*.c)))
KERNEL_BENCHES := $(if $(filter 1,$(CUDA)),$(patsubst %.cu,$(OUT)/%,$(wildcard bench/*.cu)))
PROGRAMS := $(addprefix $(OUT)/,$(if $(wildcard train/main.c),train_gpt8b) $(TOOLS))
GENERATED_FROM := $(SOURCES) train/main.c $(wildcard tools/*.c tests/*.c tests/*/*.c bench/*.c)

##@ Build
all: $(PROGRAMS) ## the trainer and its tools, in build/<flavour>/ with links in the root (none for an OUT of your own)
	$(if $(findstring command,$(origin OUT)),,$(Q)for p in $(notdir $(PROGRAMS)); do ln -sf $(OUT)/$$p $$p; done)
	@echo "built $(OUT): MPI=$(MPI) CUDA=$(CUDA)"

asan: ## all tests under AddressSanitizer and UBSan
	$(MAKE) BUILD=asan CUDA=0 test

tsan: ## the threaded tests under ThreadSanitizer (no OpenMP)
	$(MAKE) BUILD=tsan CUDA=0 MPI=0 test/data test/dist test/checkpoint test/optim test/train

$(OUT)/%.o: %.c
	@mkdir -p $(@D)
	$(Q)$(CC) $(CFLAGS) $(if $(findstring dist/comm,$<),$(MPI_CFLAGS)) $(if $(findstring cuda,$<)$(findstring nccl,$<),$(CUDA_CFLAGS)) -MMD -MP -c $< -o $@

arch_of = $(or $(findstring sm100,$1),$(findstring sm90,$1),cuda)
# ptxas only remarks that it ignored setmaxnreg (C7508) or put wgmma products one after the other (C7510 to C7516, C7520):
# errors.
$(OUT)/%.cu.o: %.cu
	@mkdir -p $(@D)
	$(Q)$(NVCC) $(NVFLAGS) $(NVFLAGS_$(call arch_of,$<)) $(GENCODE_$(call arch_of,$<)) -MMD -MP -c $< -o $@ 2>$@.log; status=$$?; cat $@.log >&2; \
	    if grep -qE 'C75(08|1[0-6]|20)' $@.log; then status=1; fi; rm -f $@.log; exit $$status

$(LIBRARY): $(OBJECTS)
	$(Q)rm -f $@ && ar rcs $@ $^

$(OUT)/train_gpt8b: $(OUT)/train/main.o $(LIBRARY)
	$(Q)$(CC) $(LDFLAGS) $^ $(LDLIBS) -o $@
$(addprefix $(OUT)/,$(TOOLS)): $(OUT)/%: $(OUT)/tools/%.o $(LIBRARY)
	$(Q)$(CC) $(LDFLAGS) $^ $(LDLIBS) -o $@
$(BENCHES): $(OUT)/bench/%: $(OUT)/bench/%.o $(LIBRARY)
	$(Q)$(CC) $(LDFLAGS) $^ $(LDLIBS) -o $@
$(KERNEL_BENCHES): $(OUT)/bench/%: $(OUT)/bench/%.cu.o $(LIBRARY)
	$(Q)$(CC) $(LDFLAGS) $^ $(LDLIBS) -o $@
.SECONDEXPANSION:
$(TESTS) $(GPU_TESTS): $(OUT)/%: $(OUT)/%.o $$(call TEST_HELPERS,$$(dir $$*)) $(LIBRARY)
	$(Q)$(CC) $(LDFLAGS) $^ $(LDLIBS) -lcmocka -o $@

ifneq ($(SANITIZE),)
# They say which kernels they launched (tests/launches_cuda.c).
$(GPU_TESTS): $(OUT)/tests/launches_cuda.o
$(GPU_TESTS): LDFLAGS += $(foreach f,__cudaRegisterFunction __cudaGetKernel cudaLaunchKernelExC,-Wl,--wrap=$f)
endif

$(FUZZERS): $(OUT)/%: $(OUT)/%.o $(OUT)/tests/fuzz/harness.o $(OUT)/tests/data/shard_files.o $(LIBRARY)
	$(Q)$(CC) $(LDFLAGS) $^ $(LDLIBS) -o $@

##@ Use
demo: deps ## install what is missing, build, train matched arms on real text, print the verdicts, write a report
	$(MAKE) all
	tools/demo.sh

##@ Check
test: deps tidy ## all tests that need no GPU
	$(MAKE) all
	$(MAKE) test-binaries
	BUILD_DIR=$(OUT) tools/run_tests.sh $(TESTS)

test/%: ## the tests of one room: make test/attention
	$(if $(filter run faults,$*),$(MAKE) all)
	$(MAKE) $(patsubst %.c,$(OUT)/%,$(wildcard tests/$*/test_*.c))
	BUILD_DIR=$(OUT) tools/run_tests.sh $(patsubst %.c,$(OUT)/%,$(wildcard tests/$*/test_*.c))

test-gpu: all test-gpu-binaries ## the tests that need a GPU
	BUILD_DIR=$(OUT) tools/run_tests.sh $(GPU_TESTS)

LIMIT ?= 0
sanitize-gpu: $(if $(SANITIZE),$(PROGRAMS) $(GPU_TESTS)) ## the small cases of the GPU tests under compute-sanitizer, in a build of their own; LIMIT=seconds a program
	$(if $(SANITIZE),BUILD_DIR=$(OUT) tools/sanitize_gpu.sh $(LIMIT) $(GPU_TESTS) $(OUT)/train_gpt8b,$(MAKE) SANITIZE=1 sanitize-gpu)

sass: $(foreach k,$(KERNELS),$(if $(findstring sm90,$k),$(OUT)/$k.o)) ## look at the machine code of the Hopper kernels
	$(Q)tools/check_sass.sh $^

gpu/%: ## build the GPU tests of one room: make gpu/attention
	$(MAKE) $(patsubst %.c,$(OUT)/%,$(wildcard tests/$*/gpu_*.c))

test-binaries: $(TESTS)
test-gpu-binaries: $(GPU_TESTS)
fuzzers: $(FUZZERS)

SECONDS ?= 60
SEED    ?= 1
fuzz: ## fuzz the readers of files, SECONDS=60 each, with sanitizers and a fixed seed; needs clang
	$(Q)MAKE="$(MAKE)" tests/fuzz/fuzz.sh $(SECONDS)

soak: all ## the long tests: kills, signals and full disks at many points, 64 ranks, every layout; SEED=1
	$(MAKE) $(filter $(OUT)/tests/faults/%,$(TESTS))
	BUILD_DIR=$(OUT) SEED=$(SEED) tools/soak.sh

bench: $(BENCHES) $(KERNEL_BENCHES) ## build the benchmarks: build/<flavour>/bench/*

tidy: ## includes point one way, files stay small, nothing forbidden
	$(Q)tools/tidy.sh

format: ## rewrite the sources with clang-format
	clang-format -i $$(git ls-files -co --exclude-standard '*.c' '*.h' '*.cu' '*.cuh')

format-check: ## fail if clang-format would change anything
	clang-format --dry-run -Werror $$(git ls-files -co --exclude-standard '*.c' '*.h' '*.cu' '*.cuh')

compile_commands.json: ## for clangd and clang-tidy
	bear --output $@ -- $(MAKE) -B OUT=build/bear all

##@ House
deps: ## install missing packages (Debian, Ubuntu); names them for other systems
	$(Q)tools/install_deps.sh

clean: ## remove build/ and the links in the root
	rm -rf build $(notdir $(PROGRAMS)) compile_commands.json

help: ## this text
	@awk 'BEGIN {FS = ":.*## "} /^##@/ {printf "\n%s\n", substr($$0, 5)} /^[a-z_%\/.-]+:.*## / {printf "  %-24s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

.PHONY: all asan tsan demo test test-gpu sanitize-gpu sass test-binaries test-gpu-binaries fuzzers fuzz soak bench tidy format format-check deps clean help
-include $(patsubst %.c,$(OUT)/%.d,$(GENERATED_FROM)) $(KERNELS:%.cu=$(OUT)/%.cu.d)

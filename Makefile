# Berm's build. `make help` lists the targets.
#
# Everything is pure Go: no C compiler is needed to build. The race detector of
# the tests needs one.

GO       ?= go
GOARCH   ?= $(shell $(GO) env GOARCH)
VERSION  ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
LDFLAGS  := -s -w -X main.version=$(VERSION)
BUILD    := CGO_ENABLED=0 GOARCH=$(GOARCH) $(GO) build -trimpath
AGENTS   := internal/embedded/bin/$(GOARCH)
PLATFORM := cmd/berm/platform/$(GOARCH)
# With the race detector programs sleep for a second before they end, and tests start many.
RACE     := CGO_ENABLED=1 GORACE=atexit_sleep_ms=10
# Each test binary is linked anew: without DWARF, which tracebacks do not need, in two thirds of the time.
# Both targets run go vet before.
LEAN     := -vet=off -ldflags=-w
SUDO     := $(if $(filter 0,$(shell id -u)),,sudo)
PACKAGES := build-essential e2fsprogs mmdebstrap uidmap ca-certificates curl busybox-static \
            bubblewrap python3-venv debian-archive-keyring zstd xfsprogs btrfs-progs

# What the tests of the code interpreter's server run on.
JUPYTER  := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/berm/interpreter

.PHONY: help build agents runsc setup demo test test-all test-probes test-cycles test-disks test-qemu test-containers test-agents test-desktop test-interpreter bench bench-lazy fuzz lint proto clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 14

build: agents ## build bin/berm, with the platform and the helper binaries inside
	@mkdir -p $(PLATFORM)
	$(BUILD) -ldflags '$(LDFLAGS)' -o $(PLATFORM)/ ./cmd/berm-platform
	$(BUILD) -ldflags '$(LDFLAGS)' -o bin/berm ./cmd/berm

agents: ## build berm-monitor, berm-init and berm-guest, to be embedded
	@mkdir -p $(AGENTS)
	$(BUILD) -ldflags '-s -w' -o $(AGENTS)/ ./cmd/berm-monitor ./cmd/berm-init ./cmd/berm-guest

runsc: ## build bin/runsc, gVisor at the version in go.mod, for the isolation level gvisor (a minute or two, once)
	@mkdir -p bin
	version=$$($(GO) list -m -f '{{.Version}}' gvisor.dev/gvisor) && $(BUILD) \
		-ldflags "-s -w -X gvisor.dev/gvisor/runsc/version.version=$$version" -o bin/runsc gvisor.dev/gvisor/runsc

setup: ## install the packages that build, template and tests need
	$(SUDO) apt-get update -qq
	$(SUDO) env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(PACKAGES) >/dev/null
	python3 -m venv $(JUPYTER)
	$(JUPYTER)/bin/pip install -q --disable-pip-version-check -c internal/template/interpreter/requirements.txt tornado jupyter_client

demo: setup build ## build, make the default template, start a server, run the SDK example
	examples/demo

# Many packages wait more than they compute: twice as many as there are processors run at a time.
test: build ## the fast tests, with the race detector: a developer's loop
	$(GO) vet ./...
	$(RACE) $(GO) test -race $(LEAN) -p $$((2 * $$(nproc))) ./test/local ./...

# The packages that take longest come first, so that none of them runs on alone at the end.
test-all: build runsc ## everything: slow tests, official SDKs, probes, faults, load
	$(SUDO) env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null
	$(GO) vet ./...
	GOARCH=arm64 CGO_ENABLED=0 $(GO) vet ./cmd/... ./internal/...
	bin/berm template build base
	BERM_TEST_ALL=1 $(RACE) $(GO) test -race $(LEAN) -timeout 40m ./test/probes ./internal/template ./test/load ./...
	$(GO) test -tags failpoint -run 'Crash|Fail|Dies' ./internal/driver/namespace ./internal/driver/gvisor ./internal/template ./internal/local/... ./internal/audit/... ./internal/depot
	test/e2e/run
	test/e2e/run gvisor
	test/e2e/interpreter/run namespace
	test/containers/run
	test/agents/run codex

test-containers: build ## the examples of docs/containers.md, on the template code-interpreter-v1
	test/containers/run

test-agents: build ## let codex and claude-code, whose terms you must have accepted, work in berm run
	test/agents/run codex
	test/agents/run claude-code

test-desktop: build ## build the templates browser and desktop, drive them by Playwright and E2B's desktop SDKs
	$(SUDO) env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null
	test/e2e/run desktop

test-interpreter: build runsc ## build the code interpreter's template and drive it with the official packages, at both levels
	test/e2e/interpreter/run namespace
	test/e2e/interpreter/run gvisor

test-qemu: build ## the driver under cgroup v2 and kernel 6.1, in an emulated machine
	$(SUDO) env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends qemu-system-x86 cpio >/dev/null
	test/qemu/run

test-cycles: build runsc ## 100 times write, pause, save, go on and verify at level gvisor; its monitor broken between any two steps
	BERM_TEST_ALL=1 BERM_TEST_CYCLES=100 $(GO) test -count=1 -timeout 30m -run 'TestDriver/MemoryOverAndOver' ./internal/driver/gvisor
	BERM_TEST_ALL=1 $(GO) test -count=1 -timeout 30m -tags failpoint -run TestMonitorFails ./internal/driver/gvisor

test-disks: build runsc ## the drivers, snapshots and full disks on XFS, on btrfs and in depots, at both levels: a quarter of an hour
	BERM_TEST_ALL=1 BERM_TEST_DISKS=all $(GO) test -count=1 -timeout 60m ./test/disks ./internal/depot
	BERM_TEST_ALL=1 BERM_TEST_DISKS=all $(GO) test -count=1 -timeout 10m -run InADepot ./test/faults

test-probes: build runsc ## the probes at level gvisor after a pause, in forks, and of networks and credentials
	BERM_TEST_ALL=1 BERM_TEST_PROBES=all $(GO) test -count=1 -timeout 90m -run 'TestProbesLater|TestNetworkGVisor' ./test/probes

bench-lazy: build ## the first output of a sandbox of a 2 GiB image, lazily and whole: four minutes, 10 GiB of disk
	BERM_TEST_ALL=1 BERM_TEST_LAZY_MIB=2048 $(GO) test -count=1 -v -timeout 20m -run TestSpeed ./test/lazy

bench: build ## measure, print ratios, write bench/*.json
	@mkdir -p bench
	$(GO) run ./test/bench -out bench

fuzz: ## fuzz every parser for FUZZTIME (default 20s) each
	test/fuzz $(or $(FUZZTIME),20s)

lint: ## golangci-lint, at the pinned version
	$(GO) run github.com/golangci/golangci-lint/v2/cmd/golangci-lint@v2.15.0 run

proto: ## regenerate the protocol code (needs protoc and the two Go plugins)
	protoc -I proto --go_out=. --go_opt=module=github.com/berm-sandbox/berm \
		--connect-go_out=. --connect-go_opt=module=github.com/berm-sandbox/berm \
		$(shell find proto -name '*.proto' 2>/dev/null)

clean: ## remove what build made
	rm -rf bin bench internal/embedded/bin/amd64 internal/embedded/bin/arm64

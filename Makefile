# `make help` lists what there is. The work is done by scripts/*.sh.

PREFIX ?= /usr/local
DESTDIR ?=
.DEFAULT_GOAL := help
.PHONY: help build quickstart test test-kernels fuzz soak check bench install uninstall clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

build: ## dist/osb (one static file) and dist/execd (the daemon inside it)
	@scripts/build.sh release

quickstart: ## build, start a server, run a program in a sandbox by the official Python SDK, clean up
	@scripts/quickstart.sh

test: ## all tests: Rust, then the official clients against a server (needs root)
	@scripts/test.sh

test-kernels: ## the engine on other kernels and poorer hosts, in virtual machines (long); ONLY="name …" for some
	@scripts/vm/tests.sh $(ONLY)

fuzz: ## what reads other people's bytes in the daemon, with random ones; MINUTES=10 each, ONLY="name …" for some
	@scripts/fuzz.sh $(ONLY)

soak: ## ten thousand commands of the daemon, a third of which go wrong, and what they leave; COMMANDS=10000
	@OSB_SOAK=$(or $(COMMANDS),10000) cargo test --locked -p osb-execd --test soak -- --nocapture

check: ## formatting, lints, licences and sources of dependencies, pages
	@scripts/check.sh

bench: build ## measure the figures of docs/numbers.md (needs root); FIGURES="name …" for some
	@bench/run $(or $(FIGURES),all)

install: ## copy dist/osb to $(PREFIX)/bin; run `make build` before
	@test -x dist/osb || { echo "error: dist/osb is missing: run 'make build' first" >&2; exit 1; }
	install -D -m 0755 dist/osb $(DESTDIR)$(PREFIX)/bin/osb
	ln -sfn osb $(DESTDIR)$(PREFIX)/bin/opensandbox-server

uninstall: ## remove what install made; `osb server --purge` before removes sandboxes and images too
	rm -f $(DESTDIR)$(PREFIX)/bin/opensandbox-server $(DESTDIR)$(PREFIX)/bin/osb

clean: ## remove build results and .venv
	cargo clean
	rm -rf dist .venv

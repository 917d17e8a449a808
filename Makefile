# Everyday commands. `make` alone lists them.

SHELL := /bin/bash
export PATH := $(or $(CARGO_HOME),$(HOME)/.cargo)/bin:$(PATH):/usr/sbin:/sbin

CARGO  ?= cargo
TARGET  = $(or $(CARGO_TARGET_DIR),target)
PREFIX ?= /usr/local
BINS    = vtl vtl-lab vtld
LIBVTL  = libvtl.so.0
ARCHIVE = $(abspath $(TARGET)/release/libvtl_c.a)
C_FILES = $(shell git ls-files -co --exclude-standard '*.c' '*.h')
# What tests leave out, and why: a line each.
SKIPPED = $(abspath $(TARGET))/skipped
list_skipped = status=$$?; [ ! -s $(SKIPPED) ] || { echo; echo 'skipped:'; sort -u $(SKIPPED) | sed 's/^/  /'; }; exit $$status

.DEFAULT_GOAL := help
.PHONY: help preflight setup build demo bench bench-full check test fuzz sanitize miri soak check-systems check-kernels lint format fmt wheel install install-texts uninstall clean

help: ## This list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 21

preflight:
	@scripts/preflight.sh "make $(firstword $(MAKECMDGOALS))"

setup: ## Install what is missing: system packages (as root), the pinned Rust toolchain
	@scripts/setup.sh

build: setup ## Build everything (release)
	@$(CARGO) build --release --workspace --locked

demo: preflight build ## Download a file over a bad link: TCP cubic, TCP BBR and VTL, side by side (as root)
	@$(TARGET)/release/vtl demo $(DEMO_ARGS)

bench: preflight build ## About six minutes of measurements with pictures in target/bench (as root, nothing else running)
	@mkdir -p $(TARGET)/bench
	@$(TARGET)/release/vtl bench run bench/plans/quick*.toml --json $(TARGET)/bench/rows.json --plot $(TARGET)/bench

bench-full: preflight build ## Every plan: many hours
	@mkdir -p $(TARGET)/bench-full
	@$(TARGET)/release/vtl bench run bench/plans/*.toml --json $(TARGET)/bench-full/rows.json --plot $(TARGET)/bench-full

# Lints and the tests of each crate but $(1) in one pass, and what fuzzing has found so far: clippy is the compiler. It builds
# soonest without optimisation, debug information and what is kept for the next build. The end-to-end tests are compiled and not
# run, and what is forked has no lints.
crates = export CARGO_PROFILE_DEV_DEBUG=0 CARGO_INCREMENTAL=0 RUSTC_WORKSPACE_WRAPPER=clippy-driver CLIPPY_ARGS=-Dwarnings__CLIPPY_HACKERY__; \
	 $(CARGO) test --workspace --exclude sctp-proto --all-targets --locked --quiet --no-run && \
	 $(CARGO) test --workspace $(patsubst %,--exclude %,vtl-e2e sctp-proto $(1)) --lib --bins --tests --locked --quiet && \
	 scripts/fuzz.sh replay
documents = RUSTDOCFLAGS='-D warnings' $(CARGO) doc --release --workspace --no-deps --locked --quiet

check: format ## In one to two minutes (the first time five), without root: formatting, lints, the tests of each crate
	@rm -f $(SKIPPED); export VTL_SKIPPED=$(SKIPPED) RUST_BACKTRACE=0; unset CI; $(call crates); $(list_skipped)

# What is simulated is optimised here.
test: preflight format build ## What check does, documentation and the end-to-end tests, some forty minutes (as root, for hosts and links)
	@rm -f $(SKIPPED); export VTL_SKIPPED=$(SKIPPED) RUST_BACKTRACE=0; \
	 ($(call crates,vtl-sim)) && \
	 $(CARGO) test --release -p vtl-sim -p sctp-proto --locked --quiet && \
	 $(documents) && scripts/deny.sh && scripts/check-headers.sh && \
	 $(CARGO) test --release --workspace --locked --test e2e -- --test-threads=4; $(list_skipped)

fuzz: setup ## Coverage-guided fuzzing of all that strangers reach, 20 s for each target, or SECONDS=n, TARGETS='wire nego'
	@scripts/fuzz.sh $(or $(SECONDS),20) $(TARGETS)

# UndefinedBehaviorSanitizer is in that code in every test (crates/vtl-sim/build.rs). Leaks are not looked for: tests leak names. ARGS='--test grafts' runs some.
sanitize: setup ## The grafts' code, natively and under AddressSanitizer, through all tests of vtl-sim
	ASAN_OPTIONS=detect_leaks=0 RUSTFLAGS=-Zsanitizer=address RUSTC_BOOTSTRAP=1 $(CARGO) test --release --locked --quiet \
	 -p vtl-sim --target-dir $(TARGET)/sanitize --target "$$(rustc --version --verbose | sed -n 's/^host: //p')" $(ARGS)

miri: setup ## The unsafe code of the rings under Miri (installs a nightly toolchain by rustup if there is none)
	@rustup component list --toolchain nightly --installed 2>/dev/null | grep -q ^miri || \
	 rustup toolchain install nightly --no-self-update --profile minimal -c miri -c rust-src
	MIRIFLAGS='-Zmiri-disable-isolation -Zmiri-ignore-leaks' PROPTEST_CASES=$(or $(PROPTEST_CASES),4) \
	 $(CARGO) +nightly miri test --locked --quiet -p vtl-ring --lib --target-dir $(TARGET)/miri

soak: preflight build ## The long tests, with a report: seeds, accidents, load; an hour, or BUDGET=seconds (as root)
	@scripts/soak.sh $(BUDGET)

check-systems: ## What a newcomer meets: the demo and the tests on bare systems made by debootstrap (as root)
	@scripts/check-systems.sh $(SYSTEMS)

check-kernels: setup ## What loads eBPF, under the kernels of Debian 13 and Ubuntu 24.04, in QEMU (as root); E2E='rules__ tun__' end to end, too
	@scripts/check-kernels.sh $(SYSTEMS)

lint: format ## rustfmt, clang-format, clippy, rustdoc, and cargo-deny with RustSec's advisories
	VTL_EMPTY_OBJECTS=1 $(CARGO) clippy --release --workspace --exclude sctp-proto --all-targets --locked --quiet -- -D warnings
	$(documents)
	@scripts/deny.sh

format: setup
	$(CARGO) fmt --all --check
	$(CARGO) fmt --manifest-path fuzz/Cargo.toml --check
	@$(if $(C_FILES),clang-format-19 --dry-run --Werror $(C_FILES))

fmt: ## Format Rust and C
	$(CARGO) fmt --all
	$(CARGO) fmt --manifest-path fuzz/Cargo.toml
	@$(if $(C_FILES),clang-format-19 -i $(C_FILES))

wheel: build ## Build the Python package as a wheel in target/wheels
	@VTL_ARCHIVE=$(ARCHIVE) python3 python/backend.py $(TARGET)/wheels

install: build ## Copy the binaries, the C library, service, completions and man pages below PREFIX (/usr/local)
	install -sDm755 -t $(DESTDIR)$(PREFIX)/bin $(BINS:%=$(TARGET)/release/%)
	@umask 022 && $(MAKE) --no-print-directory install-texts
	@[ -n "$(DESTDIR)" ] || ldconfig || echo "run ldconfig as root, so that programs find $(LIBVTL)"
	@[ -n "$(DESTDIR)" ] || systemd-sysusers $(PREFIX)/lib/sysusers.d/vtl.conf || \
	    echo "make the user and the group vtl before you start the unit: it runs as that user"
	@[ -n "$(DESTDIR)" ] || [ ! -d /run/systemd/system ] || systemctl daemon-reload

install-texts:
	install -d $(DESTDIR)$(PREFIX)/lib/systemd/system
	sed 's|@PREFIX@|$(PREFIX)|' dist/vtld.service >$(DESTDIR)$(PREFIX)/lib/systemd/system/vtld.service
	install -Dm644 -t $(DESTDIR)$(PREFIX)/lib/systemd/system dist/vtld-frames.socket
	install -Dm644 dist/vtl.sysusers $(DESTDIR)$(PREFIX)/lib/sysusers.d/vtl.conf
	install -d $(DESTDIR)$(PREFIX)/share/man/man1
	$(TARGET)/release/vtl man $(DESTDIR)$(PREFIX)/share/man/man1
	install -d $(DESTDIR)$(PREFIX)/share/bash-completion/completions
	$(TARGET)/release/vtl completions bash >$(DESTDIR)$(PREFIX)/share/bash-completion/completions/vtl
	VTL_ARCHIVE=$(ARCHIVE) scripts/libvtl.sh $(TARGET)/libvtl $(PREFIX)
	install -Dm644 -t $(DESTDIR)$(PREFIX)/lib $(TARGET)/libvtl/libvtl.a $(TARGET)/libvtl/$(LIBVTL)
	ln -sf $(LIBVTL) $(DESTDIR)$(PREFIX)/lib/libvtl.so
	install -Dm644 -t $(DESTDIR)$(PREFIX)/lib/pkgconfig $(TARGET)/libvtl/vtl.pc
	install -Dm644 -t $(DESTDIR)$(PREFIX)/include include/vtl.h include/vtl-layer.h
	install -Dm644 -t $(DESTDIR)$(PREFIX)/share/man/man3 dist/vtl.3

uninstall: ## Stop the service, and remove what `make install` copied; the user and the group vtl stay, as files may be theirs
	@[ -n "$(DESTDIR)" ] || [ ! -d /run/systemd/system ] || systemctl disable --now --quiet vtld vtld-frames.socket || true
	rm -f $(BINS:%=$(DESTDIR)$(PREFIX)/bin/%) $(DESTDIR)$(PREFIX)/share/man/man1/vtl.1 \
	    $(DESTDIR)$(PREFIX)/share/man/man1/vtl-*.1 \
	    $(DESTDIR)$(PREFIX)/share/bash-completion/completions/vtl \
	    $(DESTDIR)$(PREFIX)/lib/systemd/system/vtld.service \
	    $(DESTDIR)$(PREFIX)/lib/systemd/system/vtld-frames.socket \
	    $(DESTDIR)$(PREFIX)/lib/sysusers.d/vtl.conf \
	    $(DESTDIR)$(PREFIX)/lib/libvtl.a $(DESTDIR)$(PREFIX)/lib/libvtl.so \
	    $(DESTDIR)$(PREFIX)/lib/$(LIBVTL) $(DESTDIR)$(PREFIX)/lib/pkgconfig/vtl.pc \
	    $(DESTDIR)$(PREFIX)/include/vtl.h $(DESTDIR)$(PREFIX)/include/vtl-layer.h \
	    $(DESTDIR)$(PREFIX)/share/man/man3/vtl.3
	@[ -n "$(DESTDIR)" ] || ldconfig || true
	@[ -n "$(DESTDIR)" ] || [ ! -d /run/systemd/system ] || systemctl daemon-reload

clean: ## Remove build output
	$(CARGO) clean

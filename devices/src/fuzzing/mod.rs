//! The bodies of fuzz targets: for each device a function that interprets any bytes as the actions
//! of a guest and of the host's end.
//!
//! A body panics when an invariant is violated. The targets in `tests/fuzz/` run them under
//! libFuzzer; ordinary tests run the same bodies over the inputs in `tests/fuzz/seeds` and over
//! some thousands derived from them ([`exercise`]).

mod ports;
mod virtio;
mod virtio_mem;

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::Path;
use std::time::{Duration, Instant};

/// Time limit of one input; a device that exceeds it hangs.
const INPUT_TIME_MAX: Duration = Duration::from_secs(10);
/// The longest input that [`exercise`] generates.
const INPUT_BYTES_MAX: usize = 4096;
/// Numbers that are often boundary values.
const EDGES: [u8; 8] = [0, 1, 2, 4, 0x10, 0x7f, 0x80, 0xff];

/// What a target does with an input.
pub type Body = fn(&[u8]);

/// One fuzz target.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Its name, and that of its file in `tests/fuzz/fuzz_targets`.
    pub name: &'static str,
    /// Its body.
    pub run: Body,
}

/// The targets of this crate.
pub const TARGETS: &[Target] = &[
    Target {
        name: "block",
        run: virtio::block,
    },
    Target {
        name: "net",
        run: virtio::net,
    },
    Target {
        name: "rng",
        run: virtio::rng,
    },
    Target {
        name: "vsock",
        run: virtio::vsock,
    },
    Target {
        name: "console",
        run: virtio::console,
    },
    Target {
        name: "balloon",
        run: virtio::balloon,
    },
    Target {
        name: "mem",
        run: virtio_mem::mem,
    },
    Target {
        name: "transport",
        run: virtio::transport,
    },
    Target {
        name: "serial",
        run: ports::serial,
    },
    Target {
        name: "i8042",
        run: ports::i8042,
    },
    Target {
        name: "i8254",
        run: ports::i8254,
    },
    Target {
        name: "rtc",
        run: ports::rtc,
    },
    Target {
        name: "acpi_pm",
        run: ports::acpi_pm,
    },
    Target {
        name: "panic_port",
        run: ports::panic_port,
    },
    Target {
        name: "bus",
        run: ports::bus,
    },
];

/// Makes targets of names and bodies, for crates whose bodies do not depend on this one.
pub const fn targets<const N: usize>(bodies: [(&'static str, Body); N]) -> [Target; N] {
    let (name, run) = bodies[0];
    let mut targets = [Target { name, run }; N];
    let mut at = 1;
    while at < N {
        let (name, run) = bodies[at];
        targets[at] = Target { name, run };
        at += 1;
    }
    targets
}

/// The body of the target `name` among `targets`.
///
/// # Panics
///
/// Panics when there is none.
pub fn body(targets: &[Target], name: &str) -> fn(&[u8]) {
    let found = targets.iter().find(|target| target.name == name);
    found.unwrap_or_else(|| panic!("no fuzz target {name}")).run
}

/// Runs a target over the inputs in the directory `seeds`, and over `count` derived ones, the same
/// each time. Returns the number of executions.
///
/// # Panics
///
/// Panics when there are no seeds, or when the target fails; the message then names the file with
/// the input.
pub fn exercise(target: &Target, seeds: &Path, count: usize) -> usize {
    let mut inputs: Vec<Vec<u8>> = Vec::new();
    let mut paths: Vec<_> = std::fs::read_dir(seeds)
        .unwrap_or_else(|error| panic!("{}: {error}", seeds.display()))
        .map(|entry| entry.expect("an entry").path())
        .collect();
    paths.sort();
    assert!(!paths.is_empty(), "{} has no inputs", seeds.display());
    for path in paths {
        inputs.push(std::fs::read(path).expect("an input"));
    }
    for input in &inputs {
        once(target, input);
    }
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    for _ in 0..count {
        once(target, &random.input(&inputs));
    }
    inputs.len() + count
}

fn once(target: &Target, input: &[u8]) {
    let begin = Instant::now();
    let result = catch_unwind(AssertUnwindSafe(|| (target.run)(input)));
    let late = begin.elapsed() > INPUT_TIME_MAX;
    if result.is_ok() && !late {
        return;
    }
    let name = format!("ssi-hv-fuzz-{}-{}", target.name, std::process::id());
    let path = std::env::temp_dir().join(name);
    let kept = std::fs::write(&path, input);
    eprintln!(
        "the fuzz target {} fails with the input {} ({kept:?})",
        target.name,
        path.display()
    );
    match result {
        Ok(()) => panic!("it took {:?}", begin.elapsed()),
        Err(panic) => resume_unwind(panic),
    }
}

/// Pseudo-random numbers (xorshift64, Marsaglia 2003).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// A number below `limit`, which is not 0.
    fn below(&mut self, limit: usize) -> usize {
        let limit = u64::try_from(limit).unwrap_or(u64::MAX);
        usize::try_from(self.next() % limit).unwrap_or(0)
    }

    fn byte(&mut self) -> u8 {
        match self.below(3) {
            0 => EDGES[self.below(EDGES.len())],
            _ => self.next().to_le_bytes()[0],
        }
    }

    /// A mutation of one of `inputs`; sometimes only noise.
    fn input(&mut self, inputs: &[Vec<u8>]) -> Vec<u8> {
        let mut input = match self.below(5) {
            0 => (0..self.below(512)).map(|_| self.byte()).collect(),
            _ => inputs[self.below(inputs.len())].clone(),
        };
        for _ in 0..=self.below(6) {
            let at = self.below(input.len() + 1);
            match self.below(5) {
                0 => input.insert(at, self.byte()),
                1 if at < input.len() => drop(input.remove(at)),
                2 => {
                    // The rest comes from another input.
                    let other = &inputs[self.below(inputs.len())];
                    input.truncate(at);
                    input.extend(&other[self.below(other.len() + 1)..]);
                }
                3 if at < input.len() => input[at] ^= 1 << self.below(8),
                _ if at < input.len() => input[at] = self.byte(),
                _ => input.push(self.byte()),
            }
        }
        input.truncate(INPUT_BYTES_MAX);
        input
    }
}

/// Generates tests that run each target of `TARGETS` over its seeds and over derived inputs, and
/// one that compares the names in `TARGETS`, in `tests/fuzz/fuzz_targets` and in
/// `tests/fuzz/Cargo.toml`. There are 2,000 derived inputs, or as many as `inputs` says.
#[macro_export]
macro_rules! fuzz_tests {
    (inputs = $inputs:literal; $($name:ident)*) => {
        fn directory() -> std::path::PathBuf {
            // Crates are nested, so the workspace is not always the parent directory.
            std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
                .ancestors()
                .map(|parent| parent.join("tests/fuzz"))
                .find(|directory| directory.is_dir())
                .expect("the workspace has tests/fuzz")
        }

        $(
            #[test]
            fn $name() {
                const INPUTS: usize = $inputs;
                let name = stringify!($name);
                let mut targets = super::TARGETS.iter();
                let target = targets.find(|target| target.name == name).unwrap();
                let seeds = directory().join("seeds").join(name);
                let count = $crate::fuzzing::exercise(target, &seeds, INPUTS);
                assert!(count > INPUTS);
                println!("FUZZED: {name}, {count} executions");
            }
        )*

        #[test]
        fn each_target_is_tested_and_has_a_file() {
            let names: Vec<_> = super::TARGETS.iter().map(|target| target.name).collect();
            assert_eq!(names, [$(stringify!($name)),*]);
            let manifest = std::fs::read_to_string(directory().join("Cargo.toml")).unwrap();
            for name in names {
                let declared = format!("name = \"{name}\"\npath = \"fuzz_targets/{name}.rs\"\n");
                assert!(manifest.contains(&declared), "{name} is not in Cargo.toml");
                let file = directory().join(format!("fuzz_targets/{name}.rs"));
                let text = std::fs::read_to_string(&file).unwrap();
                assert!(text.contains(&format!("\"{name}\"")), "{}", file.display());
            }
        }
    };
    ($($name:ident)*) => {
        $crate::fuzz_tests! { inputs = 2_000; $($name)* }
    };
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    crate::fuzz_tests! {
        block net rng vsock console balloon mem transport serial i8042 i8254 rtc acpi_pm
        panic_port bus
    }

    #[test]
    fn a_target_that_fails_is_noticed_and_its_input_kept() {
        static SUM: AtomicUsize = AtomicUsize::new(0);
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("a"), b"abc").unwrap();
        let target = Target {
            name: "of-a-test",
            run: |input| {
                SUM.fetch_add(input.len(), Ordering::Relaxed);
                assert!(!input.starts_with(b"abc"));
            },
        };
        assert!(catch_unwind(|| exercise(&target, directory.path(), 10)).is_err());
        assert_eq!(SUM.load(Ordering::Relaxed), 3);
        let kept = format!("ssi-hv-fuzz-of-a-test-{}", std::process::id());
        let kept = std::env::temp_dir().join(kept);
        assert_eq!(std::fs::read(&kept).unwrap(), b"abc");
        std::fs::remove_file(kept).unwrap();
    }
}

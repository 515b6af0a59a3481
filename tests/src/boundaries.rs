//! Checks the forbidden dependencies between crates, and between parts of them, against `cargo
//! metadata` and the sources.
//!
//! Each rule is a row of a table. Transitive dependencies through crates of the workspace count;
//! dependencies of tests and build scripts do not.

mod cycles;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Crates of the fabric that communicate with other hosts.
const FABRIC_NETWORK: &[&str] = &[
    "fabric-identity",
    "fabric-peers",
    "fabric-transport",
    "fabric-verbs",
    "fabric-wire",
    "memory-fabric",
];

/// Crates that open sockets.
const SOCKET_CRATES: &[&str] = &["quinn-proto", "quinn-udp", "socket2", "tokio", "hyper"];

/// Crates that use KVM.
const KVM_CRATES: &[&str] = &["kvm-bindings", "kvm-ioctls", "ssi-hv-machine"];

/// The monitor, and the crates that it provides to programs.
const MONITOR_CRATES: &[&str] = &[
    "ssi-hv",
    "ssi-hv-api",
    "ssi-hv-control",
    "ssi-hv-html",
    "ssi-hv-metrics",
];

/// A package with the packages that it must not depend on.
struct Forbidden {
    package: &'static str,
    dependencies: &'static [&'static [&'static str]],
}

const FORBIDDEN: &[Forbidden] = &[
    Forbidden {
        package: "fabric-host",
        dependencies: &[FABRIC_NETWORK, SOCKET_CRATES, &["fabric-pages"]],
    },
    // The coherence protocol is explored state by state: nothing in it may wait, measure or send.
    Forbidden {
        package: "fabric-coherence",
        dependencies: &[FABRIC_NETWORK, SOCKET_CRATES, KVM_CRATES, MONITOR_CRATES],
    },
    Forbidden {
        package: "fabric-sharing",
        dependencies: &[KVM_CRATES, MONITOR_CRATES, &["memory-fabric"]],
    },
    Forbidden {
        package: "fabric-pages",
        dependencies: &[FABRIC_NETWORK, SOCKET_CRATES],
    },
    Forbidden {
        package: "fabric-wire",
        dependencies: &[
            SOCKET_CRATES,
            &[
                "fabric-identity",
                "fabric-transport",
                "fabric-verbs",
                "memory-fabric",
            ],
        ],
    },
    Forbidden {
        package: "fabric-verbs",
        dependencies: &[
            SOCKET_CRATES,
            &[
                "fabric-identity",
                "fabric-pages",
                "fabric-transport",
                "fabric-wire",
                "memory-fabric",
            ],
        ],
    },
    Forbidden {
        package: "fabric-identity",
        dependencies: &[
            SOCKET_CRATES,
            &[
                "fabric-pages",
                "fabric-transport",
                "fabric-verbs",
                "fabric-wire",
                "memory-fabric",
            ],
        ],
    },
    // The authority makes files, and connects to nobody.
    Forbidden {
        package: "fabric-pki",
        dependencies: &[
            KVM_CRATES,
            MONITOR_CRATES,
            SOCKET_CRATES,
            &[
                "clap",
                "fabric-pages",
                "fabric-transport",
                "fabric-wire",
                "memory-fabric",
            ],
        ],
    },
    // What compute nodes send each other is no part of what donors are sent.
    Forbidden {
        package: "fabric-peers",
        dependencies: &[
            KVM_CRATES,
            MONITOR_CRATES,
            &[
                "devices",
                "fabric-transport",
                "fabric-wire",
                "memory-fabric",
            ],
        ],
    },
    Forbidden {
        package: "fabric-transport",
        dependencies: &[KVM_CRATES, &["memory-fabric", "ssi-hv"]],
    },
    // A layer between the pager and its transports.
    Forbidden {
        package: "fabric-sealing",
        dependencies: &[KVM_CRATES, MONITOR_CRATES, &["memory-fabric"]],
    },
    Forbidden {
        package: "memory-fabric",
        dependencies: &[KVM_CRATES, &["clap", "devices", "ssi-hv", "ssi-hv-api"]],
    },
    Forbidden {
        package: "devices",
        dependencies: &[FABRIC_NETWORK, KVM_CRATES, &["clap", "ssi-hv"]],
    },
    Forbidden {
        package: "ssi-hv-machine",
        dependencies: &[
            FABRIC_NETWORK,
            MONITOR_CRATES,
            &["clap", "kernel-images", "serde"],
        ],
    },
    Forbidden {
        package: "ssi-hv-irqchip",
        dependencies: &[
            FABRIC_NETWORK,
            KVM_CRATES,
            MONITOR_CRATES,
            SOCKET_CRATES,
            &["clap", "devices", "libc", "rustix", "serde"],
        ],
    },
    Forbidden {
        package: "ssi-hv-nodes",
        dependencies: &[
            FABRIC_NETWORK,
            KVM_CRATES,
            MONITOR_CRATES,
            SOCKET_CRATES,
            &["clap", "devices", "libc", "serde"],
        ],
    },
    Forbidden {
        package: "ssi-hv-api",
        dependencies: &[
            FABRIC_NETWORK,
            KVM_CRATES,
            SOCKET_CRATES,
            &["clap", "devices", "ssi-hv"],
        ],
    },
    Forbidden {
        package: "ssi-hv-control",
        dependencies: &[FABRIC_NETWORK, KVM_CRATES, &["clap", "devices", "ssi-hv"]],
    },
    // Who is in a cluster is public, and no page, key or token of one comes near it.
    Forbidden {
        package: "ssi-hv-membership",
        dependencies: &[
            KVM_CRATES,
            MONITOR_CRATES,
            &[
                "clap",
                "devices",
                "fabric-peers",
                "fabric-sealing",
                "fabric-transport",
                "fabric-wire",
                "memory-fabric",
            ],
        ],
    },
    Forbidden {
        package: "ssi-hv-html",
        dependencies: &[
            FABRIC_NETWORK,
            KVM_CRATES,
            SOCKET_CRATES,
            &["clap", "devices", "ssi-hv", "ssi-hv-control"],
        ],
    },
    Forbidden {
        package: "ssi-hv-metrics",
        dependencies: &[
            FABRIC_NETWORK,
            KVM_CRATES,
            SOCKET_CRATES,
            &["clap", "devices", "ssi-hv", "ssi-hv-control"],
        ],
    },
    Forbidden {
        package: "initrd",
        dependencies: &[
            FABRIC_NETWORK,
            KVM_CRATES,
            MONITOR_CRATES,
            &["clap", "devices", "kernel-images"],
        ],
    },
    // The image builder runs host tools; the monitor must work without them.
    Forbidden {
        package: "ssi-hv",
        dependencies: &[&["kernel-images"]],
    },
];

/// A source folder or file, with words that must not appear in its code.
struct Unsaid {
    sources: &'static str,
    words: &'static [&'static str],
}

/// The crates below the fabric's facade, as sources name them.
const FABRIC_LAYERS: &[&str] = &[
    "fabric_homes",
    "fabric_host",
    "fabric_pages",
    "fabric_transport",
    "fabric_wire",
];

const UNSAID: &[Unsaid] = &[
    Unsaid {
        sources: "vmm/irqchip/src/local",
        words: &["std::net", "std::time", "std::thread", "std::sync"],
    },
    Unsaid {
        sources: "memory-fabric/pages/src",
        words: &["std::net", "std::os::unix::net", "socket2"],
    },
    Unsaid {
        sources: "memory-fabric/coherence/src",
        words: &[
            "std::net",
            "std::os",
            "std::thread",
            "std::time",
            "socket2",
            "libc::",
        ],
    },
    Unsaid {
        sources: "memory-fabric/wire/src",
        words: &["std::net", "std::os::unix::net", "socket2", "libc::"],
    },
    Unsaid {
        sources: "memory-fabric/host/src",
        words: &["std::net", "std::os::unix::net", "socket2"],
    },
    // A lost packet must not cost 200 ms: connections are prepared by `fabric_host::prefer_latency`.
    Unsaid {
        sources: "memory-fabric/transport/src",
        words: &["set_nodelay", "set_tcp_nodelay"],
    },
    Unsaid {
        sources: "memory-fabric/src",
        words: &["set_nodelay", "set_tcp_nodelay"],
    },
    Unsaid {
        sources: "memory-fabric/peers/src/tcp/handshake.rs",
        words: &["set_nodelay", "set_tcp_nodelay"],
    },
    Unsaid {
        sources: "vmm/src/config",
        words: &["clap"],
    },
    Unsaid {
        sources: "vmm/src/cluster",
        words: &["clap"],
    },
    Unsaid {
        sources: "vmm/src/instance",
        words: &["anyhow", "clap", "kvm_bindings", "kvm_ioctls"],
    },
    // The monitor knows the fabric by its facade; its benchmarks measure the layers.
    Unsaid {
        sources: "vmm/src/instance",
        words: FABRIC_LAYERS,
    },
    Unsaid {
        sources: "vmm/src/config",
        words: FABRIC_LAYERS,
    },
    Unsaid {
        sources: "vmm/src/cluster",
        words: FABRIC_LAYERS,
    },
    Unsaid {
        sources: "vmm/src/cli",
        words: FABRIC_LAYERS,
    },
    Unsaid {
        sources: "vmm/src/status",
        words: FABRIC_LAYERS,
    },
    Unsaid {
        sources: "vmm/src/doctor",
        words: FABRIC_LAYERS,
    },
];

/// Direct dependencies of each package of the workspace, without those of tests and build scripts.
type Dependencies = BTreeMap<String, BTreeSet<String>>;

fn dependencies_of(metadata: &serde_json::Value) -> Dependencies {
    let packages = metadata["packages"].as_array().expect("packages");
    let names = |package: &serde_json::Value| {
        let direct = package["dependencies"].as_array().expect("dependencies");
        let normal = direct.iter().filter(|one| one["kind"].is_null());
        let names = normal.filter_map(|one| one["name"].as_str().map(str::to_owned));
        let name = package["name"].as_str().expect("a name").to_owned();
        (name, names.collect())
    };
    packages.iter().map(names).collect()
}

/// Returns all packages reachable from `package` through the packages in the table.
fn reachable<'a>(all: &'a Dependencies, package: &'a str) -> BTreeSet<&'a str> {
    let mut found = BTreeSet::new();
    let mut ahead = vec![package];
    while let Some(next) = ahead.pop() {
        for name in all.get(next).into_iter().flatten() {
            if found.insert(name.as_str()) {
                ahead.push(name);
            }
        }
    }
    found
}

fn violations(all: &Dependencies, rules: &[Forbidden]) -> Vec<String> {
    let mut found = Vec::new();
    for rule in rules {
        if !all.contains_key(rule.package) {
            found.push(format!("the table names {}, which is gone", rule.package));
        }
        let reached = reachable(all, rule.package);
        let forbidden = rule.dependencies.iter().copied().flatten();
        for name in forbidden.filter(|name| reached.contains(**name)) {
            found.push(format!("{} must not depend on {name}", rule.package));
        }
    }
    found
}

/// Returns the code of a line without its comment.
fn code(line: &str) -> &str {
    line.split("//").next().unwrap_or_default()
}

/// Returns every Rust source file below `path`.
fn sources(path: &Path) -> Vec<PathBuf> {
    if path.is_file() {
        return vec![path.to_owned()];
    }
    let entries = std::fs::read_dir(path).unwrap_or_else(|error| panic!("{path:?}: {error}"));
    let mut found: Vec<_> = entries
        .flat_map(|entry| sources_or_none(&entry.expect("an entry").path()))
        .collect();
    found.sort();
    found
}

fn sources_or_none(path: &Path) -> Vec<PathBuf> {
    let is_rust = path.extension().is_some_and(|extension| extension == "rs");
    // `scripts/fuzz` builds in `tests/fuzz/target`, and build scripts write sources there.
    let is_built = path.file_name().is_some_and(|name| name == "target");
    if path.is_dir() && !is_built || is_rust {
        sources(path)
    } else {
        Vec::new()
    }
}

fn workspace() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

/// Lines of the longest source file.
const LINES_MAX: usize = 500;

#[test]
fn no_source_is_too_long() {
    let folders = ["devices", "kernel-images", "memory-fabric", "tests", "vmm"];
    let all = folders.map(|folder| sources(&workspace().join(folder)));
    let long = |path: &PathBuf| {
        let text = std::fs::read_to_string(path).expect("a source");
        let lines = text.lines().count();
        let split = || {
            format!(
                "{}: {lines} lines, {LINES_MAX} is the limit",
                path.display()
            )
        };
        (lines > LINES_MAX).then(split)
    };
    let found: Vec<_> = all.iter().flatten().filter_map(long).collect();
    assert!(found.is_empty(), "split {found:#?}");
}

#[test]
fn no_crate_depends_on_what_it_must_not_know() {
    let output = std::process::Command::new(env!("CARGO"))
        .args(["metadata", "--no-deps", "--offline", "--format-version=1"])
        .current_dir(workspace())
        .output()
        .expect("cargo");
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
    let metadata = serde_json::from_slice(&output.stdout).expect("JSON");
    let found = violations(&dependencies_of(&metadata), FORBIDDEN);
    assert!(found.is_empty(), "{found:#?}");
}

#[test]
fn no_source_names_what_it_must_not_know() {
    let mut found = Vec::new();
    for rule in UNSAID {
        for path in sources(&workspace().join(rule.sources)) {
            let text = std::fs::read_to_string(&path).expect("a source");
            for (line, number) in text.lines().zip(1..) {
                let words = rule.words.iter().filter(|word| code(line).contains(**word));
                found.extend(words.map(|word| format!("{}:{number}: {word}", path.display())));
            }
        }
    }
    assert!(found.is_empty(), "{found:#?}");
}

#[test]
fn a_dependency_by_way_of_another_crate_counts_and_one_of_tests_does_not() {
    let metadata = serde_json::json!({ "packages": [
        { "name": "a", "dependencies": [
            { "name": "b", "kind": null }, { "name": "t", "kind": "dev" },
        ] },
        { "name": "b", "dependencies": [{ "name": "c", "kind": null }] },
    ] });
    let all = dependencies_of(&metadata);
    let rule = |dependencies| Forbidden {
        package: "a",
        dependencies,
    };
    assert_eq!(
        violations(&all, &[rule(&[&["t", "c"]])]),
        ["a must not depend on c"]
    );
    let gone = Forbidden {
        package: "gone",
        dependencies: &[],
    };
    assert_eq!(violations(&all, &[gone]).len(), 1);
}

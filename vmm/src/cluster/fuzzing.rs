//! What the fuzz target of cluster files runs. The crate `devices` says how it is run; only tests
//! depend on it.

use std::path::Path;

use toml::{Table, Value};

use super::{Cluster, command_line};

/// What a target does with an input.
pub type Body = fn(&[u8]);

/// The names of the targets of this crate, with their bodies.
pub const BODIES: [(&str, Body); 1] = [("cluster_file", cluster_file)];

/// The body of the target `name`.
///
/// # Panics
/// When there is none.
#[must_use]
pub fn body(name: &str) -> Body {
    let found = BODIES.iter().find(|(other, _)| *other == name);
    found.unwrap_or_else(|| panic!("no fuzz target {name}")).1
}

/// Any text as the file of a cluster: refused with one line that names the file, or read and
/// printed as what is read as the same.
fn cluster_file(input: &[u8]) {
    const PATH: &str = "cluster.toml";
    let path = Path::new(PATH);
    let Ok(text) = std::str::from_utf8(input) else {
        return;
    };
    // It would name another file, which is read.
    let named: Result<Table, _> = toml::from_str(text);
    if named.is_ok_and(|table| matches!(table.get("vm"), Some(Value::String(_)))) {
        return;
    }
    let cluster = match Cluster::of(path, text) {
        Ok(cluster) => cluster,
        Err(error) => {
            let text = format!("{:#}", anyhow::Error::from(error));
            assert!(text.contains(PATH), "{text}");
            return;
        }
    };
    for node in &cluster.nodes {
        assert!(!node.name.as_str().is_empty());
        let words = command_line::node_arguments(node).expect("UTF-8, as the file is");
        assert_eq!(words.first().map(String::as_str), Some("node"));
    }
    let printed = cluster.printed().expect("UTF-8, as the file is");
    let again = Cluster::of(path, &printed).expect("what was printed here");
    // By then each node has the name that it has by its number.
    assert_eq!(again.printed().expect("UTF-8"), printed);
    let of = |cluster: &Cluster| -> Vec<_> {
        let nodes = cluster.nodes.iter();
        nodes
            .map(|node| (node.name.to_string(), node.config.clone()))
            .collect()
    };
    assert_eq!((of(&again), &again.vm), (of(&cluster), &cluster.vm));
}

#[cfg(test)]
const TARGETS: [devices::fuzzing::Target; BODIES.len()] = devices::fuzzing::targets(BODIES);

#[cfg(test)]
mod tests {
    devices::fuzz_tests! { inputs = 20_000; cluster_file }
}

//! What the guest's kernel says about its CPUs and NUMA nodes, as `lscpu` shows it.

use std::path::Path;

use serde::Serialize;

/// CPUs and NUMA nodes. What the kernel does not say is missing.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
pub struct Machine {
    /// CPUs that are online, as a list such as `0-3`.
    online: Option<String>,
    /// Model of the first CPU.
    model: Option<String>,
    /// Packages.
    sockets: usize,
    /// What the kernel reads the time from.
    clock: Option<String>,
    nodes: Vec<Node>,
}

/// A NUMA node.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct Node {
    node: usize,
    /// A list such as `0-3`.
    cpus: String,
    memory_bytes: u64,
    /// To each of the nodes; 10 is this one.
    distances: Vec<u64>,
}

impl Machine {
    /// Reads it from `/proc` and `/sys` below `root`.
    pub fn read(root: &Path) -> Self {
        let text = |path: &str| std::fs::read_to_string(root.join(path)).ok();
        let line = |path: &str| text(path).map(|text| text.trim().to_owned());
        let cpuinfo = text("proc/cpuinfo").unwrap_or_default();
        let field = |name: &'static str| {
            let lines = cpuinfo.lines().filter_map(|line| line.split_once(':'));
            lines.filter_map(move |(key, value)| (key.trim() == name).then_some(value.trim()))
        };
        let mut sockets: Vec<&str> = field("physical id").collect();
        sockets.sort_unstable();
        sockets.dedup();
        let node = |node: usize| {
            let dir = format!("sys/devices/system/node/node{node}");
            let words = line(&format!("{dir}/distance")).unwrap_or_default();
            Some(Node {
                node,
                cpus: line(&format!("{dir}/cpulist"))?,
                memory_bytes: memory_of(&text(&format!("{dir}/meminfo"))?)?,
                distances: words.split(' ').filter_map(|w| w.parse().ok()).collect(),
            })
        };
        Self {
            online: line("sys/devices/system/cpu/online"),
            model: field("model name").next().map(str::to_owned),
            sockets: sockets.len(),
            clock: line("sys/devices/system/clocksource/clocksource0/current_clocksource"),
            nodes: (0..super::team::CPUS_MAX).filter_map(node).collect(),
        }
    }
}

/// Reads the bytes from a line such as `Node 0 MemTotal:  238504 kB`.
fn memory_of(meminfo: &str) -> Option<u64> {
    let (_, rest) = meminfo.split_once("MemTotal:")?;
    let kib: u64 = rest.split_whitespace().next()?.parse().ok()?;
    Some(kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_of_two_nodes_is_read() {
        let dir = std::env::temp_dir().join(format!("faultprobe-{}", std::process::id()));
        let write = |path: &str, text: &str| {
            let path = dir.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        let cpu = |id| format!("model name\t: A CPU\nphysical id\t: {id}\n\n");
        write("proc/cpuinfo", &(cpu(0) + &cpu(1)));
        write("sys/devices/system/cpu/online", "0-1\n");
        for node in [0, 1] {
            let path = |file| format!("sys/devices/system/node/node{node}/{file}");
            write(&path("cpulist"), &format!("{node}\n"));
            write(&path("distance"), "10 40\n");
            write(
                &path("meminfo"),
                &format!("Node {node} MemTotal:  4 kB\nNode {node} MemFree: 1 kB\n"),
            );
        }
        let machine = Machine::read(&dir);
        std::fs::remove_dir_all(&dir).unwrap();
        assert_eq!(machine.online.as_deref(), Some("0-1"));
        assert_eq!(
            (machine.model.as_deref(), machine.sockets),
            (Some("A CPU"), 2)
        );
        assert_eq!((machine.nodes.len(), machine.clock), (2, None));
        let last = &machine.nodes[1];
        assert_eq!(
            (last.node, last.cpus.as_str(), last.memory_bytes),
            (1, "1", 4096)
        );
        assert_eq!(last.distances, [10, 40]);
        assert_eq!(Machine::read(Path::new("/absent")), Machine::default());
    }
}

//! Tests of valid and invalid cluster files.

use std::fs;
use std::path::PathBuf;

use super::*;
use crate::config::file::{keys_of, to_table};

/// Any file with contents is accepted as a kernel here.
const KERNEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");

struct File {
    _directory: tempfile::TempDir,
    path: PathBuf,
}

fn file(text: &str) -> File {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let path = directory.path().join("cluster.toml");
    fs::write(&path, text.replace("KERNEL", KERNEL)).expect("is written");
    File {
        _directory: directory,
        path,
    }
}

fn read(text: &str) -> Result<Cluster, ClusterError> {
    let file = file(text);
    let cluster = Cluster::read(&file.path)?;
    cluster.validate(&file.path)?;
    Ok(cluster)
}

/// Returns the error line, including the causes.
fn refused(text: &str) -> String {
    let error = anyhow::Error::from(read(text).expect_err(text));
    let line = format!("{error:#}");
    assert_eq!(line.lines().count(), 1, "{line}");
    line
}

const GOOD: &str = r#"
[vm]
name = "web"
kernel = "KERNEL"
memory = "1G"

[[node]]
memory = "256M"

[[node]]
name = "far"
ssh = "root@10.0.0.2"
listen = "0.0.0.0:7000"
memory = "512M"
lease-seconds = 20
insecure = true
"#;

fn good() -> Cluster {
    let file = file(&GOOD.replace("[vm]", "[vm]\ninsecure = true"));
    let cluster = Cluster::read(&file.path).expect("is read");
    cluster.validate(&file.path).expect("is right");
    cluster
}

#[test]
fn nodes_become_donors_of_the_vm() {
    let cluster = good();
    let names: Vec<_> = cluster
        .nodes
        .iter()
        .map(|node| node.name.as_str())
        .collect();
    assert_eq!(names, ["node-1", "far"]);
    let near = cluster.nodes[0].reached_at("127.0.0.1:5".parse().expect("an address"));
    let far = cluster.nodes[1].reached_at("0.0.0.0:7000".parse().expect("an address"));
    assert_eq!(far.to_string(), "10.0.0.2:7000");
    let shown = Some("0b".repeat(32).parse().expect("a fingerprint"));
    let vm = cluster.vm_with(&[(near, None), (far, shown)]);
    let donors: Vec<_> = vm.donors.iter().map(ToString::to_string).collect();
    assert_eq!(donors[0], "127.0.0.1:5,memory=256 MiB");
    assert!(donors[1].starts_with("10.0.0.2:7000,memory=512 MiB,fingerprint=0b"));

    let mut divided = cluster;
    divided.vm.local_memory = Some(crate::size::ByteSize::from_mib(256));
    let reached = ["h:1", "h:2"].map(|text| (text.parse().expect("an address"), None));
    let vm = divided.vm_with(&reached);
    assert!(vm.donors.iter().all(|donor| donor.memory.is_none()));
}

const WITH_CPUS: &str = r#"
[vm]
kernel = "KERNEL"
cpus = 4
memory = "1G"

[[node]]
memory = "1G"
cpus = 1

[[node]]
listen = "127.0.0.1:7001"
memory = "1G"
cpus = 2
"#;

#[test]
fn nodes_with_cpus_run_vcpus_of_the_vm() {
    let cluster = read(WITH_CPUS).expect("is right");
    let reached = ["h:1", "h:2"].map(|text| (text.parse().expect("an address"), None));
    let vm = cluster.vm_with(&reached);
    let nodes: Vec<_> = vm.nodes.iter().map(ToString::to_string).collect();
    assert_eq!(nodes, ["h:1,cpus=1", "h:2,cpus=2"]);
    assert!(vm.donors.is_empty());
    let words = command_line::vm_arguments(&vm).expect("UTF-8");
    assert!(words.contains(&"--node=h:2,cpus=2".to_owned()), "{words:?}");
    let half = WITH_CPUS.replace("memory = \"1G\"\ncpus = 2", "memory = \"512M\"\ncpus = 2");
    let vm = read(&half).expect("is right").vm_with(&reached);
    assert_eq!(vm.nodes[1].to_string(), "h:2,cpus=2,memory=512 MiB");
    let words = command_line::node_arguments(&cluster.nodes[1]).expect("UTF-8");
    assert!(words.contains(&"--cpus=2".to_owned()), "{words:?}");
    let text = WITH_CPUS.replace("cpus = 2", "");
    let vm = read(&text)
        .expect("a donor beside a node")
        .vm_with(&reached);
    let donors: Vec<_> = vm.donors.iter().map(ToString::to_string).collect();
    assert_eq!(
        (vm.nodes.len(), &donors[..]),
        (1, &["h:2,memory=1 GiB".to_owned()][..])
    );
    for (from, to, part) in [
        ("cpus = 4", "cpus = 3", "all 3 vCPUs"),
        ("cpus = 2", "cpus = 2\nfrom = 'boot'", "`from=boot`"),
        ("cpus = 2", "cpus = 0\nfrom = 'init'", "it lends none"),
        ("cpus = 2", "cpus = 255", "node node-2: --cpus 255"),
        (
            "cpus = 4",
            "cpus = 4\nreplicas = 2",
            "--replicas 2 needs 2 donors, each for one copy of a page; the number given is 0",
        ),
        (
            "memory = \"1G\"\n\n[[node]]\nmemory",
            "memory = \"1G\"\nlocal-memory = \"1023M\"\n\n[[node]]\nmemory",
            "--local-memory 1023 MiB is not a multiple",
        ),
    ] {
        let text = WITH_CPUS.replacen(from, to, 1);
        assert_ne!(text, WITH_CPUS, "{from}");
        let line = refused(&text);
        assert!(line.contains(part), "{text}: {line}");
    }
}

#[test]
fn the_printed_file_gives_the_same() {
    let first = good();
    let printed = file(&first.printed().expect("is TOML"));
    let mut second = Cluster::read(&printed.path).expect("is read");
    // The printed file contains the defaults.
    second.nodes[0].place.name = None;
    assert_eq!(first, second);
}

#[test]
fn what_is_wrong_is_named_with_its_part_and_what_to_write() {
    let node =
        |keys: &str| format!("[vm]\nkernel = \"KERNEL\"\n[[node]]\nmemory = \"64M\"\n{keys}");
    for (text, part) in [
        ("memory = '1G'", "unknown key `memory`; a cluster has [vm]"),
        ("[[node]]\nmemory = '64M'", "[vm]: is missing"),
        (
            "vm = 'no-such.toml'",
            "cannot read the VM's file no-such.toml",
        ),
        (
            "[vm]\nmemroy = 1",
            "unknown key `memroy`; did you mean `memory`?",
        ),
        ("[vm]\nend-with-fd = 1", "unknown key `end-with-fd`"),
        ("[vm]\ncpus = 'two'", "[vm]: invalid type"),
        ("[vm]\nmemory = '1X'", "`1X` is not a size"),
        ("[vm]\nmemory = '1X'", "in `memory`"),
        (
            "[vm]\ncluster = 'c.toml'",
            "[vm]: cluster is for `ssi-hv run`",
        ),
        ("[vm]\ncpus = 1", "[vm]: no kernel given"),
        ("node = 1\n[vm]", "node: is not a list"),
        ("node = [1]\n[vm]", "node node-1: is not a table"),
        ("[vm\n", ":1: "),
        (&node("memmory = 1"), "did you mean `memory`?"),
        (&node("ssh_options = []"), "did you mean `ssh-options`?"),
        (&node("metrcs = 1"), "unknown key `metrcs`"),
        (
            &node("end-with-stdin = true"),
            "unknown key `end-with-stdin`",
        ),
        (&node("lease-seconds = 0"), "node node-1: --lease-seconds 0"),
        (&node("listen = '0.0.0.0:7000'"), "add --insecure"),
        (
            &node("listen = 'nowhere'"),
            "node node-1: `nowhere` has no valid port",
        ),
        (&node("name = '1'"), "`1` is not a name"),
        (
            &node("name = 'b'\nssh = 'h'"),
            "node b: a node on another host needs listen",
        ),
        (
            &node("ssh = '-oProxyCommand=x'\nlisten = 'h:1'"),
            "is no host for ssh",
        ),
        (
            &node("ssh = 'a b'\nlisten = 'h:1'"),
            "`a b` is no host for ssh",
        ),
        (&node("ssh-program = 'x'"), "need ssh = "),
        (&node("ssh = 'h'\nnamespace = true"), "exclude each other"),
        (
            &node("namespace = true\nlisten = '10.0.0.1:1'"),
            "is chosen",
        ),
        (
            &node("[[node]]\nname = 'node-1'\nmemory = '64M'"),
            "another node has the name",
        ),
        (
            &node("[[node]]\nlisten = '127.0.0.1:1'"),
            "missing field `memory`",
        ),
        (
            &node("listen = '127.0.0.1:7'\n[[node]]\nlisten = '127.0.0.1:7'\nmemory = '64M'"),
            "[vm]: donor 127.0.0.1:7 is the same",
        ),
        (GOOD, "[vm]: donor 10.0.0.2:7000 is not a loopback address"),
    ] {
        let line = refused(text);
        assert!(line.contains(part), "{text}: {line}");
    }
}

#[test]
fn every_key_of_a_place_is_known_and_none_is_a_flag() {
    let mut known = Place::KEYS.map(str::to_owned).to_vec();
    known.sort();
    assert_eq!(file::keys_of_places(), known);
    let flags = keys_of::<NodeSettings>();
    assert!(known.iter().all(|key| !flags.contains(key)));
}

#[test]
fn every_flag_of_a_node_is_a_key_of_its_file() {
    let mut node = good().nodes.remove(1).config;
    node.rdma_device = Some("none".into());
    node.rdma = Some("gid-index=3,mtu=1024".parse().expect("settings"));
    node.rdma_connections = Some(7);
    node.rdma_memory = Some(crate::size::ByteSize::from_mib(64));
    node.metrics = Some("127.0.0.1:9000".parse().expect("an address"));
    node.credentials = Some("alpha".into());
    node.report = Some("r.json".into());
    node.cluster = Some("etcd://h:2379".into());
    node.cluster_credentials = Some("etcd".into());
    node.member = Some("name=far".parse().expect("a member"));
    node.allow = vec!["vm/web,leases=2".parse().expect("a rule")];
    let written = to_table(&node).expect("is TOML");
    for flag in keys_of::<NodeSettings>() {
        assert!(written.contains_key(&flag), "{flag}");
    }
    let words = command_line::arguments(&written);
    for word in [
        "--rdma-connections=7",
        "--rdma-memory=64 MiB",
        "--rdma=gid-index=3,mtu=1024",
        "--allow=vm/web,leases=2",
        "--insecure",
        "--memory=512 MiB",
        "--lease-seconds=20",
    ] {
        assert!(words.contains(&word.to_owned()), "{word}: {words:?}");
    }
}

#[test]
fn a_node_has_rules_as_tables_and_they_are_printed_as_flags() {
    const RULES: &str = r#"
        vm = { kernel = "KERNEL", memory = "64M" }
        [[node]]
        memory = "1G"
        credentials = "alpha"
        [[node.allow]]
        identity = "vm/web"
        bytes = "512M"
        connections = 32
        [[node.allow]]
        identity = "vm/tenant-*"
        leases = 1
        [[node.allow]]
        file = "/etc/ssi-hv/rules"
    "#;
    let cluster = file(RULES);
    let read = Cluster::read(&cluster.path).expect("is valid");
    let words = command_line::node_arguments(&read.nodes[0]).expect("UTF-8");
    for word in [
        "--allow=vm/web,bytes=512 MiB,connections=32",
        "--allow=vm/tenant-*,leases=1",
        "--allow=@/etc/ssi-hv/rules",
    ] {
        assert!(words.contains(&word.to_owned()), "{word}: {words:?}");
    }
    // What is printed is read as the same.
    let printed = file(&read.printed().expect("UTF-8"));
    let again = Cluster::read(&printed.path).expect("is valid");
    assert_eq!(again.nodes[0].config, read.nodes[0].config);
    for (from, to, part) in [
        ("connections = 32", "connections = 3", "from 16 to 35840"),
        ("connections = 32", "size = 3", "unknown field `size`"),
        ("vm/web", "web", "ROLE/PREFIX*"),
        ("credentials = \"alpha\"", "", "add --credentials DIR"),
    ] {
        let error = refused(&RULES.replace(from, to));
        assert!(error.contains("node node-1"), "{error}");
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn a_command_for_another_host_survives_its_shell() {
    let mut node = good().nodes.remove(1);
    node.place.program = Some("/opt/it's here/ssi-hv".into());
    node.place.ssh_options = vec!["-p".into(), "2222".into()];
    let (program, words) = command_line::by_ssh(&node, "root@h", &["--quiet"]).expect("UTF-8");
    assert_eq!(program, "ssh");
    assert_eq!(words[..2], ["-p", "2222"]);
    assert!(
        words.contains(&"-oServerAliveCountMax=4".to_owned()),
        "{words:?}"
    );
    let [.., dashes, host, command] = &words[..] else {
        panic!("{words:?}")
    };
    assert_eq!((dashes.as_str(), host.as_str()), ("--", "root@h"));
    let echoed = std::process::Command::new("sh")
        .args(["-c", &command.replacen("exec ", "printf '%s\\n' ", 1)])
        .output()
        .expect("a shell");
    let echoed = String::from_utf8(echoed.stdout).expect("UTF-8");
    let lines: Vec<_> = echoed.lines().collect();
    assert_eq!(
        lines[..3],
        ["/opt/it's here/ssi-hv", "node", "--end-with-stdin"]
    );
    assert!(lines.contains(&"--memory=512 MiB"), "{lines:?}");
    assert_eq!(lines.last(), Some(&"--quiet"));
}

#[test]
fn run_takes_the_nodes_of_a_file_as_donors() {
    let with = |text: &str| {
        let file = file(text);
        let config = RunSettings {
            kernel: Some(KERNEL.into()),
            cluster: Some(file.path.clone()),
            ..RunSettings::default()
        };
        with_donors(config).map_err(|error| error.to_string())
    };
    let nodes = "[[node]]\nlisten = '127.0.0.1:7000'\nmemory = '256M'\n\
                 [[node]]\nlisten = '127.0.0.1:0'\naddress = 'localhost:7001'\nmemory = '256M'\n";
    let config = with(nodes).expect("is right");
    let donors: Vec<_> = config.donors.iter().map(ToString::to_string).collect();
    assert_eq!(
        donors,
        [
            "127.0.0.1:7000,memory=256 MiB",
            "localhost:7001,memory=256 MiB"
        ]
    );
    assert!(config.cluster.is_none() && !config.insecure);
    let ported = with("[[node]]\nmemory = '1G'").expect_err("no port");
    assert!(
        ported.contains("node node-1: its port is not known"),
        "{ported}"
    );
    let chosen = with("[[node]]\nnamespace = true\nmemory = '1G'").expect_err("no address");
    assert!(chosen.contains("its port is not known"), "{chosen}");
    let etcd = RunSettings {
        cluster: Some("etcd://h:2379".into()),
        ..RunSettings::default()
    };
    let kept = with_donors(etcd.clone()).expect("is asked at the start");
    assert_eq!(kept, etcd);
    let wrong = RunSettings {
        cluster: Some("etcd://h".into()),
        ..RunSettings::default()
    };
    let wrong = with_donors(wrong).expect_err("no port").to_string();
    assert!(wrong.contains("`h` is not HOST:PORT"), "{wrong}");
}

#[test]
fn the_example_of_the_document_is_right_and_its_table_has_every_key() {
    let document = include_str!("../../../docs/cluster.md");
    let (_, rest) = document.split_once("```toml\n").expect("an example");
    let (example, _) = rest.split_once("```").expect("its end");
    let example = example
        .replace("\"vmlinuz\"", "\"KERNEL\"")
        .replace("\"initrd.img\"", "\"KERNEL\"");
    let cluster = read(&example).expect("the example is right");
    let places: Vec<_> = cluster.nodes.iter().map(Node::placement).collect();
    assert_eq!(
        places,
        ["here", "here, in a network namespace", "on root@10.0.0.2"]
    );
    for key in Place::KEYS {
        assert!(document.contains(&format!("\n| `{key}` |")), "{key}");
    }
}

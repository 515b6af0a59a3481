//! Nodes that are processes, connected by TCP.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{SocketAddr, TcpListener};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;

use fabric_coherence::Members;
use fabric_homes::NodeId;
use fabric_pages::guest_memory::GuestMemory;
use fabric_pages::page::PAGE_SIZE;
use fabric_peers::tcp::{Secret, TcpPeers, TcpPeersConfig};
use fabric_sharing::SharedMemory;

use crate::budget::is_within_budget;
use crate::mesh::{ALL, config, member};
use crate::network::{self, Faults};
use crate::programs::{self, Program};

/// Set in the process of a node: its place, the number of nodes, the program, its rounds, and how many
/// blocks of the memory each node lends.
const NODE: &str = "SSI_HV_TEST_NODE";

const LISTENS: &str = "listens at ";
const FINISHED: &str = "finished";

struct Node {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<std::process::ChildStdout>,
}

impl Node {
    fn start(setup: &str) -> Self {
        let binary = std::env::current_exe().expect("the path of this binary");
        let mut child = Command::new(binary)
            .args(["--exact", "processes::node", "--nocapture"])
            .env(NODE, setup)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("this binary starts again");
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().expect("a pipe"));
        Self {
            child,
            input,
            output,
        }
    }

    /// The rest of the next line with this word.
    fn wait_for(&mut self, word: &str) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            let read = self.output.read_line(&mut line).expect("a pipe");
            assert!(read > 0, "a node ended before it said {word:?}");
            // The test harness may have begun the line.
            if let Some((_, rest)) = line.split_once(word) {
                return rest.trim().to_owned();
            }
        }
    }
}

/// Runs each role of a program in a process of its own.
pub fn run(name: &str, rounds: usize, lent: usize) {
    run_over(name, rounds, lent, None);
}

/// The same, over links that are slow and cut.
pub fn run_over_bad_links(name: &str, rounds: usize, lent: usize, faults: &Arc<Faults>) {
    run_over(name, rounds, lent, Some(faults));
}

fn run_over(name: &str, rounds: usize, lent: usize, faults: Option<&Arc<Faults>>) {
    let roles = programs::find(name).roles;
    let mut nodes: Vec<_> = (0..roles)
        .map(|me| Node::start(&format!("{me} {roles} {name} {rounds} {lent}")))
        .collect();
    let listening = nodes.iter_mut().map(|node| node.wait_for(LISTENS));
    let addresses: Vec<String> = listening.collect();
    for (me, node) in nodes.iter_mut().enumerate() {
        let mut seen = addresses.clone();
        // The first of two members connects to the second.
        for (other, address) in seen.iter_mut().enumerate().skip(me + 1) {
            if let Some(faults) = faults {
                let to = address.parse().expect("an address");
                let seed = (me * roles + other + 1) as u64;
                *address = network::link(to, seed, faults).to_string();
            }
        }
        let input = node.input.as_mut().expect("open");
        writeln!(input, "{}", seen.join(" ")).expect("a pipe");
    }
    // Each serves the others until all have finished.
    for node in &mut nodes {
        let said = node.wait_for(FINISHED);
        if !said.is_empty() {
            println!("{name}: {said}");
        }
    }
    for mut node in nodes {
        drop(node.input.take());
        let status = node.child.wait().expect("a child");
        assert!(status.success(), "{name}: a node ended with {status}");
    }
}

/// A node, in a process that [`run`] starts. Does nothing otherwise.
#[test]
fn node() {
    let Ok(setup) = std::env::var(NODE) else {
        return;
    };
    let words: Vec<&str> = setup.split(' ').collect();
    let [me, count, name, rounds, lent] = words[..] else {
        panic!("{NODE} is {setup:?}");
    };
    let number = |word: &str| word.parse::<usize>().expect("a number");
    let program = programs::find(name);
    let memory = shared(
        number(me),
        number(count),
        &program,
        number(rounds),
        number(lent),
    );
    let said = (program.run)(memory.memory(), number(me), number(rounds));
    if number(lent) != ALL {
        is_within_budget(&memory, number(count), number(lent));
    }
    println!("{FINISHED} {said}");
    // Others may still need pages of this node.
    let mut rest = String::new();
    let _ = std::io::stdin().read_line(&mut rest);
}

fn shared(me: usize, count: usize, program: &Program, rounds: usize, lent: usize) -> SharedMemory {
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
    println!("{LISTENS}{}", listener.local_addr().expect("bound"));
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).expect("a pipe");
    let addresses = line.split_whitespace().map(str::parse::<SocketAddr>);
    let addresses: Result<Vec<_>, _> = addresses.collect();
    let place = u8::try_from(me).expect("a few nodes");
    let ids: Vec<NodeId> = (0..).map(NodeId).take(count).collect();
    let members = Members::new(&ids).expect("a few nodes");
    let blocks = (program.bytes)(rounds).div_ceil(2 << 20);
    let memory = Arc::new(GuestMemory::new(blocks << 21).expect("memory"));
    let pages = u32::try_from(memory.bytes() / PAGE_SIZE).expect("small");
    let config = config(place, u8::try_from(count).expect("few"), blocks, lent);
    let addresses = addresses.expect("addresses");
    let mut connect = TcpPeersConfig::new(member(place), members, addresses, listener, pages);
    connect.secret = Secret([7; 32]);
    let peers = TcpPeers::connect(connect).expect("connected");
    let failed = Box::new(move |failure: fabric_sharing::Failure, losses| {
        eprintln!("node {me}: {}, {losses:?}", fabric_host::describe(&failure));
        // Threads that wait for a page would wait for ever.
        std::process::abort();
    });
    SharedMemory::start(config, memory, peers, failed).expect("a node")
}

//! Connections for other messages.

use super::super::channel::Channel;
use super::super::keeper::{Keeper, News};
use super::refusals::credentials;
use super::*;

fn streams_of(config: TcpPeersConfig, purpose: &str) -> Result<Vec<(Member, Channel)>, String> {
    let streams = Streams::begin(config, purpose).and_then(Streams::finish);
    streams.map_err(|error| error.to_string())
}

#[test]
fn each_pair_of_members_gets_a_connection_of_its_own() {
    let listeners = [listener(), listener(), listener()];
    let addresses = listeners.each_ref().map(|(_, address)| *address);
    let nodes = (0..).zip(listeners).map(|(me, (listener, _))| {
        let config = config(me, listener, &addresses);
        std::thread::spawn(move || {
            let mut streams = streams_of(config, "a test").expect("connected");
            for (_, stream) in &mut streams {
                let deadline = Instant::now() + LIMIT;
                stream.write_all_by(&[me], deadline).expect("sent");
            }
            for (peer, stream) in &mut streams {
                let mut said = [0];
                let deadline = Instant::now() + LIMIT;
                stream.read_exact_by(&mut said, deadline).expect("received");
                assert_eq!(said, [peer.place()]);
            }
            streams.len()
        })
    });
    let nodes: Vec<_> = nodes.collect();
    for node in nodes {
        assert_eq!(node.join().expect("no panic"), 2);
    }
}

#[test]
fn a_connection_for_another_purpose_is_refused() {
    let ((first, a), (second, b)) = (listener(), listener());
    // A node with the VM's secret, which connects for messages about memory.
    let mut other = credentials();
    other.me = member(1);
    let other = Keeper::start(other, &[], second).expect("threads");
    let error = streams_of(config(0, first, &[a, b]), "a test").expect_err("not connected");
    assert!(error.contains("a wrong secret"), "{error}");
    for news in other.news.try_iter() {
        assert!(!matches!(news, News::Connected(..)), "{news:?}");
    }
}

//! Exclusive names and sockets.

use std::fs;
use std::os::unix::net::UnixListener;
use std::sync::Barrier;
use std::thread;

use super::directory::{Directory, Kind};
use super::route::Service;
use super::server::{Server, ServerError};
use ssi_hv_api::name::VmName;

/// Number of processes that compete for one name, and number of rounds.
const RIVALS: usize = 4;
const RIVALRIES: usize = 50;

fn start(directory: &Directory, kind: Kind, name: Option<&VmName>) -> Result<Server, ServerError> {
    let service = Service {
        subject: (),
        routes: &[],
    };
    Server::start(directory, kind, name, service)
}

fn start_named(directory: &Directory, name: &VmName) -> Result<Server, ServerError> {
    start(directory, Kind::Vm, Some(name))
}

#[test]
fn a_socket_that_is_served_is_not_taken_over() {
    let place = tempfile::tempdir().expect("a temporary directory");
    let directory = Directory::create(&place.path().join("s")).expect("is made");
    let start = || start(&directory, Kind::Node, None);
    // A process of another container that shares the directory can have this process id.
    let path = directory.socket_path(Kind::Node, std::process::id(), None);
    let others = UnixListener::bind(&path).expect("is bound");
    let error = start().expect_err("it is served").to_string();
    assert!(error.contains("node-"), "{error}");
    drop(others);
    // A file that replaced the socket in the meantime is not removed.
    let ours = start().expect("nobody serves it");
    fs::remove_file(&path).expect("is there");
    let _others = UnixListener::bind(&path).expect("is bound");
    drop(ours);
    assert!(path.exists());
}

#[test]
fn a_name_is_free_again_when_its_server_ends() {
    let place = tempfile::tempdir().expect("a temporary directory");
    let directory = Directory::create(&place.path().join("s")).expect("is made");
    let (name, other) = (
        "web".parse().expect("a name"),
        "other".parse().expect("a name"),
    );
    let first = start_named(&directory, &name).expect("it is free");
    // Within one process the process id is the same, so a second VM cannot listen under another
    // name either.
    let error = start_named(&directory, &name).expect_err("it is taken");
    assert!(matches!(&error, ServerError::NameTaken { pid, .. } if *pid == std::process::id()));
    assert!(error.to_string().contains("--name web is taken"), "{error}");
    let second = start_named(&directory, &other).expect("another name");
    drop(first);
    let third = start_named(&directory, &name).expect("it is free again");
    drop((second, third));
}

#[test]
fn of_servers_that_want_one_name_at_once_one_gets_it() {
    let place = tempfile::tempdir().expect("a temporary directory");
    let directory = Directory::create(&place.path().join("s")).expect("is made");
    let name: VmName = "web".parse().expect("a name");
    let all_at_once = Barrier::new(RIVALS);
    let attempt = || {
        all_at_once.wait();
        start_named(&directory, &name)
    };
    for round in 0..RIVALRIES {
        let servers: Vec<_> = thread::scope(|scope| {
            let rivals: Vec<_> = (0..RIVALS).map(|_| scope.spawn(attempt)).collect();
            let servers = rivals
                .into_iter()
                .map(|rival| rival.join().expect("no panic"));
            servers.collect()
        });
        let started = servers.iter().filter(|server| server.is_ok()).count();
        assert_eq!(started, 1, "in round {round}");
    }
}

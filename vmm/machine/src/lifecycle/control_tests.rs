//! Tests of pausing, resuming and ending.

use std::sync::{Arc, mpsc};
use std::thread;

use super::*;

/// Starts a thread that passes checkpoints as fast as it can, and reports each resume.
fn spin(control: &Arc<Control>, resumed: mpsc::Sender<()>) -> thread::JoinHandle<()> {
    let control = Arc::clone(control);
    control.vcpu_starts();
    thread::spawn(move || {
        loop {
            match control.checkpoint() {
                Next::Exit => break,
                Next::Resume => resumed.send(()).unwrap(),
                Next::Run => {}
            }
        }
        control.vcpu_ended();
    })
}

const LIMIT: Duration = Duration::from_secs(30);

#[test]
fn pausing_parks_every_thread_and_ending_lets_them_go() {
    let control = Arc::new(Control::new(2).unwrap());
    let (sender, resumed) = mpsc::channel();
    let threads = [spin(&control, sender.clone()), spin(&control, sender)];
    assert!(!control.wait_paused(LIMIT), "no pause was requested");
    for _ in 0..100 {
        control.pause();
        assert!(control.wait_paused(LIMIT));
        assert!(resumed.try_recv().is_err());
        control.resume();
        for _ in &threads {
            resumed.recv_timeout(LIMIT).unwrap();
        }
    }
    control.pause();
    assert!(control.wait_paused(LIMIT));
    control.end(Ok(Outcome::Stopped));
    assert!(control.wait_all_ended(LIMIT));
    for thread in threads {
        thread.join().unwrap();
    }
}

#[test]
fn a_thread_of_devices_is_waited_for_at_the_end_and_not_when_pausing() {
    let control = Control::new(0).unwrap();
    control.device_thread_starts();
    control.pause();
    assert!(control.wait_paused(LIMIT));
    control.end(Ok(Outcome::Stopped));
    assert!(!control.wait_all_ended(Duration::ZERO));
    control.device_thread_ended();
    assert!(control.wait_all_ended(LIMIT));
}

#[test]
fn pausing_waits_for_a_device_that_is_served_and_lets_no_other_begin() {
    let control = Arc::new(Control::new(0).unwrap());
    for _ in 0..100 {
        let turn = control.device_turn().expect("it runs");
        control.pause();
        assert!(!control.wait_paused(Duration::ZERO), "one is served");
        let (sender, served) = mpsc::channel();
        let of_thread = Arc::clone(&control);
        let thread = thread::spawn(move || {
            let turn = of_thread.device_turn();
            sender.send(turn.is_some()).unwrap();
        });
        drop(turn);
        assert!(control.wait_paused(LIMIT));
        assert!(served.try_recv().is_err(), "served while paused");
        control.resume();
        assert!(served.recv_timeout(LIMIT).unwrap());
        thread.join().unwrap();
    }
    control.pause();
    let of_thread = Arc::clone(&control);
    let thread = thread::spawn(move || of_thread.device_turn().is_none());
    control.end(Ok(Outcome::Stopped));
    assert!(thread.join().unwrap(), "the end releases it");
}

#[test]
fn the_first_end_wins_and_is_given_once() {
    let control = Control::new(0).unwrap();
    control.end(Ok(Outcome::Reboot));
    control.end(Ok(Outcome::Stopped));
    assert!(matches!(control.take_end(), Some(Ok(Outcome::Reboot))));
    assert!(control.take_end().is_none());
    assert!(control.has_ended());
    assert_eq!(control.checkpoint(), Next::Exit);
    control.pause();
    control.resume();
    assert_eq!(control.checkpoint(), Next::Exit);
}

/// Notifications that another node received.
#[derive(Debug, Default)]
struct Recorder(Mutex<Vec<String>>);

impl Follower for Recorder {
    fn pause(&self, number: u32) {
        lock(&self.0).push(format!("pause {number}"));
    }

    fn resume(&self) {
        lock(&self.0).push("resume".into());
    }

    fn end(&self, end: &End) {
        lock(&self.0).push(format!("end {end:?}"));
    }
}

#[test]
fn other_nodes_pause_and_end_with_the_machine() {
    let follower = Arc::new(Recorder::default());
    let control = Control::with_followers(0, vec![Arc::clone(&follower) as _]).unwrap();
    control.vcpu_starts();
    control.pause();
    control.pause();
    assert!(
        !control.wait_paused(Duration::ZERO),
        "the node has not reported it"
    );
    control.node_parked(7);
    assert!(!control.wait_paused(Duration::ZERO), "another pause");
    control.node_parked(1);
    assert!(control.wait_paused(Duration::ZERO));
    control.resume();
    control.resume();
    control.pause();
    control.node_parked(1);
    assert!(!control.wait_paused(Duration::ZERO), "the pause before");
    control.end(Ok(Outcome::Reboot));
    control.end(Ok(Outcome::Stopped));
    assert!(!control.wait_all_ended(Duration::ZERO));
    control.vcpu_ended();
    assert!(control.wait_all_ended(Duration::ZERO));
    let due = ["pause 1", "resume", "pause 2", "end Ok(Reboot)"];
    assert_eq!(*lock(&follower.0), due);
}

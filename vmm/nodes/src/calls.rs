//! Messages that are answered, and the threads that wait for the answers.

use std::collections::HashMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use crate::message::Data;

#[derive(Debug, Default)]
struct State {
    next: u32,
    /// The answers, once they are there.
    open: HashMap<u32, Option<Data>>,
    closed: bool,
}

/// The calls of one link. No more are open than threads wait.
#[derive(Debug, Default)]
pub(crate) struct Calls {
    state: Mutex<State>,
    changed: Condvar,
}

impl Calls {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Each change is one insertion or removal.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends a call by the function, which gets its name, and waits for the answer; `None` when the
    /// link ends before.
    pub(crate) fn call(&self, send: impl FnOnce(u32)) -> Option<Data> {
        let mut state = self.lock();
        if state.closed {
            return None;
        }
        let call = state.next;
        state.next = state.next.wrapping_add(1);
        state.open.insert(call, None);
        drop(state);
        send(call);
        let waits = |state: &mut State| !state.closed && state.open.get(&call) == Some(&None);
        let state = self.changed.wait_while(self.lock(), waits);
        let mut state = state.unwrap_or_else(PoisonError::into_inner);
        state.open.remove(&call).flatten()
    }

    /// Takes an answer; false if nobody waits for it.
    pub(crate) fn answer(&self, call: u32, data: Data) -> bool {
        let mut state = self.lock();
        match state.open.get_mut(&call) {
            Some(answer @ None) => *answer = Some(data),
            // Those that were waiting when the link was closed have left.
            _ => return state.closed,
        }
        drop(state);
        self.changed.notify_all();
        true
    }

    /// Lets all go who wait, and nobody wait any more.
    pub(crate) fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_caller_gets_its_answer_and_nobody_waits_after_the_end() {
        let calls = Calls::default();
        let (sender, sent) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            let callers: Vec<_> = (0..4)
                .map(|_| {
                    let sender = sender.clone();
                    let calls = &calls;
                    scope.spawn(move || {
                        let mut mine = 0;
                        let answer = calls.call(|call| {
                            mine = call;
                            sender.send(call).unwrap();
                        });
                        (mine, answer)
                    })
                })
                .collect();
            let open: Vec<u32> = (0..4).map(|_| sent.recv().unwrap()).collect();
            assert!(!calls.answer(99, [0; 8]), "nobody asked");
            for call in &open[..3] {
                assert!(calls.answer(*call, u64::from(*call).to_le_bytes()));
                assert!(!calls.answer(*call, [0; 8]), "answered twice");
            }
            calls.close();
            for caller in callers {
                let (call, answer) = caller.join().unwrap();
                let due = open[..3].contains(&call);
                assert_eq!(answer, due.then(|| u64::from(call).to_le_bytes()));
            }
        });
        assert_eq!(calls.call(|_| panic!("the link is closed")), None);
    }
}

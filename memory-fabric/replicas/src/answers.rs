//! Answers of donors, and answers that do not come.

use crate::member::{Answer, Purpose};
use crate::transport::{AskUnsure, Operation, READ_STALL, ReplicatedTransport, WRITE_STALL, Work};
use fabric_pages::page::PAGE_SIZE;
use fabric_transport::{Completion, IN_FLIGHT_MAX};
use std::time::{Duration, Instant};

/// Interval between searches for stalled requests.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

impl ReplicatedTransport {
    /// Handles requests that wait too long.
    pub(crate) fn look_for_stalls(&mut self) {
        if self.outstanding == 0 {
            return;
        }
        let now = Instant::now();
        if now < self.look_at {
            return;
        }
        self.look_at = now + LOOK_INTERVAL;
        let mut stalled: u64 = 0;
        for index in 0..self.operations.len() {
            let Some(operation) = self.operations[index] else {
                continue;
            };
            let waited = now.saturating_duration_since(operation.since);
            match operation.work {
                Work::Read { .. }
                    if waited >= READ_STALL
                        && !operation.is_half_done
                        && operation.waits_for != 0 =>
                {
                    let index = u32::try_from(index).expect("a few operations");
                    // Without room or another copy it is tried again at the next look.
                    let posted = self.post_to_copy(index).is_ok();
                    self.operation(index).is_half_done = posted;
                }
                Work::Write if waited >= WRITE_STALL && operation.is_half_done => {
                    stalled |= operation.waits_for;
                }
                _ => {}
            }
        }
        for donor in 0..self.members.len() {
            if stalled & 1 << donor != 0 {
                let limit = WRITE_STALL.as_secs();
                let reason = format!("a write-back was not confirmed within {limit} s");
                // Without another copy the pager waits, as without replicas.
                let _ = self.set.exclude(donor, &reason);
            }
        }
    }

    /// Handles everything that has arrived from one donor.
    pub(crate) fn poll_member(&mut self, donor: usize, complete: &mut dyn FnMut(Completion<'_>)) {
        let mut others: u64 = 0;
        let Self {
            members,
            operations,
            free,
            outstanding,
            traffic,
            repairs,
            stripes,
            set,
            unposted,
            ..
        } = self;
        let id = u8::try_from(donor).expect("at most 64 donors");
        let this = 1_u64 << donor;
        // Reads that were posted to another donor as well.
        let mut answered_twice = [None; IN_FLIGHT_MAX];
        let mut twice = 0;
        members[donor].poll(&mut |purpose, answer| {
            let index = match purpose {
                Purpose::Operation(index) => index as usize,
                Purpose::Abandoned => return,
                Purpose::CopyRead(page) => {
                    match answer {
                        Answer::Page(bytes) => repairs.copy_arrived(set, page, donor, bytes),
                        Answer::Run(bytes) => repairs.pieces_arrived(set, page, donor, bytes),
                        Answer::Written | Answer::Dropped => return,
                    }
                    traffic.fetched(donor, 1);
                    return;
                }
                Purpose::CopyWrite { page, pages } => {
                    traffic.wrote(donor);
                    repairs.written(set.copies(), page, pages);
                    return;
                }
            };
            let Some(operation) = &mut operations[index] else {
                debug_assert!(false, "an answer for no operation");
                return;
            };
            operation.waits_for &= !this;
            let Operation {
                ticket, waits_for, ..
            } = *operation;
            let (work, offset) = (operation.work, operation.offset);
            let is_done = match answer {
                Answer::Page(bytes)
                    if operation.may_be_elsewhere() && !repairs.opens(set, offset, bytes) =>
                {
                    let is_last = waits_for == 0;
                    // The valid copy decides what follows, after the other one was asked.
                    let decides =
                        operation.unsure & this == 0 && operation.ask_unsure != AskUnsure::Later;
                    if !decides || !is_last {
                        traffic.fetched(donor, 1);
                    }
                    match (decides, is_last) {
                        (true, true) => complete(Completion::ReadFrom(donor, ticket, bytes)),
                        (false, true) => {
                            unposted.push_back(u32::try_from(index).expect("a few operations"));
                        }
                        _ => {}
                    }
                    decides && is_last
                }
                Answer::Page(bytes) => {
                    complete(Completion::ReadFrom(donor, ticket, bytes));
                    true
                }
                Answer::Run(bytes) if stripes.is_some() => {
                    let count = u32::try_from(bytes.len().div_ceil(PAGE_SIZE)).unwrap_or(0);
                    let is_run = operation.work != Work::Read { run: None };
                    let pages = stripes.as_mut().and_then(|all| {
                        let index = u32::try_from(index).expect("a few operations");
                        all.arrived(index, id, bytes)
                    });
                    // The pager counts the page that a fault waited for.
                    if is_run || pages.is_none() {
                        traffic.fetched(donor, count);
                    }
                    match (pages, pages.and_then(|all| all.try_into().ok())) {
                        (Some(all), _) if is_run => {
                            complete(Completion::ReadRunFrom(donor, ticket, all));
                            true
                        }
                        (_, Some(page)) => {
                            complete(Completion::ReadFrom(donor, ticket, page));
                            true
                        }
                        _ => false,
                    }
                }
                Answer::Run(bytes) => {
                    let pages = bytes.len() / PAGE_SIZE;
                    traffic.fetched(donor, u32::try_from(pages).unwrap_or(0));
                    complete(Completion::ReadRunFrom(donor, ticket, bytes));
                    true
                }
                Answer::Written => {
                    traffic.wrote(donor);
                    operation.is_half_done = true;
                    if waits_for != 0 {
                        operation.since = Instant::now();
                    } else {
                        complete(Completion::Written(ticket));
                    }
                    waits_for == 0
                }
                Answer::Dropped => {
                    if let (Work::Drop { pages }, 0) = (operation.work, waits_for) {
                        complete(Completion::Dropped(pages));
                    }
                    waits_for == 0
                }
            };
            if !is_done {
                return;
            }
            let index = u32::try_from(index).expect("a few operations");
            if let (Work::Read { run }, Some(all), true) = (work, stripes.as_mut(), set.has_check())
            {
                all.keep(index, offset, run);
            }
            operations[index as usize] = None;
            *outstanding -= 1;
            if waits_for == 0 {
                free.push(index);
            } else {
                // The number is free when nothing refers to it any more.
                others |= waits_for;
                answered_twice[twice] = Some(index);
                twice += 1;
            }
        });
        if twice > 0 {
            let answered = &answered_twice[..twice];
            for (other, member) in members.iter_mut().enumerate() {
                if others & 1 << other != 0 {
                    member.abandon(|purpose| match purpose {
                        Purpose::Operation(index) => answered.contains(&Some(index)),
                        _ => false,
                    });
                }
            }
            free.extend(answered.iter().flatten());
        }
    }
}

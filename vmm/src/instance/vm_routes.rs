//! What a VM can be asked and told on its control socket.

use std::sync::Arc;

use crate::config::GUEST_MEMORY_MIN;
use crate::control_socket::protocol::{
    BalloonBody, BalloonTarget, PAUSE_TIME_MAX, Refusal, RefusalCode, StateBody,
};
use crate::control_socket::route::{Answer, Method, Route, Work, answer};
use crate::machine::{MachineHandle, PAGE_BYTES};
use crate::status::{VmState, observed};
use devices::virtio::Balloon;

use super::hotplug;
use super::observe::{Paged, Watched};
use super::supervisor::NotDone;

/// The table; `docs/openapi.json` has the same for readers.
pub const ROUTES: &[Route<Arc<Watched>>] = &[
    look("/v1/status", |watched, _| {
        answer(200, &watched.status(&paged(watched)?))
    }),
    look("/v1/heat", |watched, _| {
        answer(200, &observed::heat(&paged(watched)?.view.heat()))
    }),
    look("/v1/report", |watched, _| {
        answer(200, &watched.report(&paged(watched)?))
    }),
    Route::look("/v1/metrics", super::metrics::of_vm),
    change(
        "/v1/pause",
        &[RefusalCode::State, RefusalCode::Late],
        |watched, _| told(200, watched.supervisor.hold(PAUSE_TIME_MAX)),
    ),
    change("/v1/resume", &[RefusalCode::State], |watched, _| {
        told(200, watched.supervisor.release())
    }),
    Route {
        status: 202,
        ..change(
            "/v1/shutdown",
            &[RefusalCode::State, RefusalCode::Starting],
            |watched, _| told(202, watched.supervisor.press_power_button()),
        )
    },
    Route {
        work: Work::End,
        status: 202,
        ..change("/v1/kill", &[], |watched, _| {
            watched.supervisor.kill();
            told(202, Ok(VmState::Ending))
        })
    },
    Route {
        refuses: &[RefusalCode::State, RefusalCode::Starting],
        ..look("/v1/balloon", |watched, _| balloon(watched))
    },
    Route {
        method: Method::Put,
        takes_body: true,
        ..change(
            "/v1/balloon",
            &[RefusalCode::State, RefusalCode::Starting],
            set_balloon,
        )
    },
    Route {
        refuses: &[RefusalCode::State, RefusalCode::Starting],
        until: Some(hotplug::next_change),
        ..look("/v1/hotplug", |watched, _| hotplug::look(watched))
    },
    Route {
        method: Method::Put,
        takes_body: true,
        status: 202,
        ..change(
            "/v1/hotplug",
            &[
                RefusalCode::State,
                RefusalCode::Starting,
                RefusalCode::Donor,
            ],
            hotplug::set,
        )
    },
];

const fn look(
    path: &'static str,
    answer: fn(&Arc<Watched>, &[u8]) -> Answer,
) -> Route<Arc<Watched>> {
    Route {
        refuses: &[RefusalCode::Starting],
        ..Route::look(path, answer)
    }
}

const fn change(
    path: &'static str,
    refuses: &'static [RefusalCode],
    answer: fn(&Arc<Watched>, &[u8]) -> Answer,
) -> Route<Arc<Watched>> {
    Route {
        method: Method::Post,
        work: Work::Change,
        refuses,
        ..Route::look(path, answer)
    }
}

pub fn starting() -> Refusal {
    let text = "the VM is starting; try again";
    Refusal::new(RefusalCode::Starting, text)
}

fn paged(watched: &Watched) -> Result<Paged, Refusal> {
    watched.paged.get().ok_or_else(starting)
}

fn told(status: u16, result: Result<VmState, NotDone>) -> Answer {
    match result {
        Ok(state) => answer(status, &StateBody { state }),
        Err(NotDone::Ending) => Err(Refusal::new(RefusalCode::State, "the VM is ending")),
        Err(NotDone::Starting) => Err(starting()),
        Err(NotDone::NoButton) => Err(Refusal::new(
            RefusalCode::State,
            "the guest does not listen to its power button (Linux does with the driver \"button\"); \
             shut it down from inside, or end it with `ssi-hv kill`",
        )),
        Err(NotDone::Late) => Err(Refusal::new(
            RefusalCode::Late,
            format!(
                "pause timed out after {} s: a vCPU or a device is blocked on a page, a disk or the \
                 console; it takes effect when that completes, unless the VM is resumed",
                PAUSE_TIME_MAX.as_secs()
            ),
        )),
    }
}

fn balloon(watched: &Watched) -> Answer {
    let (device, _) = balloon_of(watched)?;
    let bytes = |pages: u32| u64::from(pages) * PAGE_BYTES;
    answer(
        200,
        &BalloonBody {
            target_bytes: bytes(device.target_pages()),
            actual_bytes: bytes(device.actual_pages()),
        },
    )
}

fn balloon_of(watched: &Watched) -> Result<(Arc<Balloon>, MachineHandle), Refusal> {
    let (machine, _) = watched.machine.get().ok_or_else(starting)?;
    let text = "the VM was started with --balloon off";
    let balloon = watched.balloon.get();
    let balloon = balloon.ok_or_else(|| Refusal::new(RefusalCode::State, text))?;
    Ok((balloon, machine))
}

fn set_balloon(watched: &Arc<Watched>, body: &[u8]) -> Answer {
    let malformed = |text: String| Refusal::new(RefusalCode::Malformed, text);
    let target: BalloonTarget = serde_json::from_slice(body)
        .map_err(|error| malformed(format!("not {{\"target_bytes\": NUMBER}}: {error}")))?;
    let bytes = target.target_bytes;
    let limit = watched.guest.memory_bytes - GUEST_MEMORY_MIN.bytes();
    if !bytes.is_multiple_of(PAGE_BYTES) || bytes > limit {
        return Err(malformed(format!(
            "target_bytes {bytes} is not whole pages of {PAGE_BYTES} bytes up to {limit}, which \
             leaves the guest {GUEST_MEMORY_MIN}"
        )));
    }
    let (device, machine) = balloon_of(watched)?;
    let pages = u32::try_from(bytes / PAGE_BYTES)
        .map_err(|_| malformed(format!("target_bytes {bytes} is too much for a balloon")))?;
    machine.change_config(&*device, || device.set_target_pages(pages));
    balloon(watched)
}

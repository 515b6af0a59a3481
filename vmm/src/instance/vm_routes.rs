//! The requests to a VM's control socket.

use std::sync::Arc;

use devices::virtio::Balloon;

use super::supervisor::OperationError;
use super::vm::{BootedVm, Instance, starting};
use super::{
    drain_routes, hotplug_routes, metrics, move_routes, observe, placement, rebalance_routes,
    transports,
};
use crate::config::GUEST_MEMORY_MIN;
use crate::control_socket::protocol::{
    BalloonBody, BalloonTarget, PAUSE_TIME_MAX, Refusal, RefusalCode, StateBody,
};
use crate::control_socket::route::{Answer, Method, Route, Work, answer};
use crate::machine::{MachineHandle, PAGE_BYTES};
use crate::status::{VmState, observed};

/// The table; `docs/openapi.json` documents it.
pub const ROUTES: &[Route<Arc<Instance>>] = &[
    look("/v1/status", |instance, _| {
        answer(200, &observe::status(instance, &*instance.booted()?))
    }),
    look("/v1/heat", |instance, _| {
        answer(200, &observed::heat(&instance.booted()?.view.heat()))
    }),
    look("/v1/report", |instance, _| {
        answer(200, &observe::report(instance, &*instance.booted()?))
    }),
    look("/v1/transport", |instance, _| {
        answer(200, &transports::transport(instance, &*instance.booted()?))
    }),
    look("/v1/placement", |instance, _| {
        answer(200, &placement::placement(&*instance.booted()?))
    }),
    Route::look("/v1/metrics", metrics::of_vm),
    change(
        "/v1/pause",
        &[RefusalCode::State, RefusalCode::Late],
        |instance, _| state_answer(200, instance.supervisor.hold(PAUSE_TIME_MAX)),
    ),
    change("/v1/resume", &[RefusalCode::State], |instance, _| {
        state_answer(200, instance.supervisor.release())
    }),
    Route {
        status: 202,
        ..change(
            "/v1/shutdown",
            &[RefusalCode::State, RefusalCode::Starting],
            |instance, _| state_answer(202, instance.supervisor.press_power_button()),
        )
    },
    Route {
        work: Work::End,
        status: 202,
        ..change("/v1/kill", &[], |instance, _| {
            instance.supervisor.kill();
            state_answer(202, Ok(VmState::Ending))
        })
    },
    Route {
        takes_body: true,
        ..change(
            "/v1/move",
            &[RefusalCode::State, RefusalCode::Starting, RefusalCode::Late],
            move_routes::move_vcpu,
        )
    },
    Route {
        refuses: &[RefusalCode::State, RefusalCode::Starting],
        ..look("/v1/balloon", |instance, _| balloon(instance))
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
        until: Some(hotplug_routes::next_change),
        ..look("/v1/hotplug", |instance, _| hotplug_routes::look(instance))
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
            hotplug_routes::set,
        )
    },
    Route {
        refuses: &[RefusalCode::State, RefusalCode::Starting],
        until: Some(drain_routes::next_change),
        ..look("/v1/drain", |instance, _| drain_routes::look(instance))
    },
    Route {
        takes_body: true,
        status: 202,
        ..change(
            "/v1/drain",
            &[
                RefusalCode::State,
                RefusalCode::Starting,
                RefusalCode::Donor,
            ],
            drain_routes::begin,
        )
    },
    Route {
        refuses: &[RefusalCode::State, RefusalCode::Starting],
        until: Some(drain_routes::next_change),
        ..look("/v1/rebalance", |instance, _| {
            rebalance_routes::look(instance)
        })
    },
    Route {
        takes_body: true,
        status: 202,
        ..change(
            "/v1/rebalance",
            &[
                RefusalCode::State,
                RefusalCode::Starting,
                RefusalCode::Donor,
            ],
            rebalance_routes::change,
        )
    },
];

const fn look(
    path: &'static str,
    answer: fn(&Arc<Instance>, &[u8]) -> Answer,
) -> Route<Arc<Instance>> {
    Route {
        refuses: &[RefusalCode::Starting],
        ..Route::look(path, answer)
    }
}

const fn change(
    path: &'static str,
    refuses: &'static [RefusalCode],
    answer: fn(&Arc<Instance>, &[u8]) -> Answer,
) -> Route<Arc<Instance>> {
    Route {
        method: Method::Post,
        work: Work::Change,
        refuses,
        ..Route::look(path, answer)
    }
}

fn state_answer(status: u16, result: Result<VmState, OperationError>) -> Answer {
    match result {
        Ok(state) => answer(status, &StateBody { state }),
        Err(OperationError::Ending) => Err(Refusal::new(RefusalCode::State, "the VM is ending")),
        Err(OperationError::Starting) => Err(starting()),
        Err(OperationError::NoButton) => Err(Refusal::new(
            RefusalCode::State,
            "the guest does not listen to its power button (Linux does with the driver \"button\"); \
             shut it down from inside, or end it with `ssi-hv kill`",
        )),
        Err(OperationError::Late) => Err(Refusal::new(
            RefusalCode::Late,
            format!(
                "pause timed out after {} s: a vCPU or a device is blocked on a page, a disk or the \
                 console; it takes effect when that completes, unless the VM is resumed",
                PAUSE_TIME_MAX.as_secs()
            ),
        )),
    }
}

fn balloon(instance: &Instance) -> Answer {
    let booted = instance.booted()?;
    answer(200, &balloon_body(balloon_of(&booted)?.0))
}

fn balloon_body(device: &Balloon) -> BalloonBody {
    let bytes = |pages: u32| u64::from(pages) * PAGE_BYTES;
    BalloonBody {
        target_bytes: bytes(device.target_pages()),
        actual_bytes: bytes(device.actual_pages()),
    }
}

fn balloon_of(booted: &BootedVm) -> Result<(&Balloon, &MachineHandle), Refusal> {
    let machine = booted.machine()?;
    let text = "the VM was started with --balloon off";
    let balloon = booted.balloon.as_deref();
    let balloon = balloon.ok_or_else(|| Refusal::new(RefusalCode::State, text))?;
    Ok((balloon, machine))
}

fn set_balloon(instance: &Arc<Instance>, body: &[u8]) -> Answer {
    let malformed = |text: String| Refusal::new(RefusalCode::Malformed, text);
    let target: BalloonTarget = serde_json::from_slice(body)
        .map_err(|error| malformed(format!("not {{\"target_bytes\": NUMBER}}: {error}")))?;
    let bytes = target.target_bytes;
    let limit = instance.guest.memory_bytes - GUEST_MEMORY_MIN.bytes();
    if !bytes.is_multiple_of(PAGE_BYTES) || bytes > limit {
        return Err(malformed(format!(
            "target_bytes {bytes} is not whole pages of {PAGE_BYTES} bytes up to {limit}, which \
             leaves the guest {GUEST_MEMORY_MIN}"
        )));
    }
    let booted = instance.booted()?;
    let (device, machine) = balloon_of(&booted)?;
    let pages = u32::try_from(bytes / PAGE_BYTES)
        .map_err(|_| malformed(format!("target_bytes {bytes} is too much for a balloon")))?;
    machine.change_config(device, || device.set_target_pages(pages));
    answer(200, &balloon_body(device))
}

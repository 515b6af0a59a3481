//! Messages as bytes: a length of 2 bytes, the kind, and its fields in order, little-endian.

use ssi_hv_irqchip::{Event, Routing, Trigger};

use crate::message::{Access, CpuidEntry, End, Message, Space, Start};

/// Most bytes of a frame, with its length.
pub const FRAME_BYTES_MAX: usize = 2 + u16::MAX as usize;

/// Most bytes of a text in a message.
pub const TEXT_BYTES_MAX: usize = 1024;

/// Most bytes of [`Message::Report`].
pub const REPORT_BYTES_MAX: usize = 48 << 10;

/// Most bytes of the state of a vCPU in [`Message::Vcpu`].
pub const VCPU_STATE_BYTES_MAX: usize = 32 << 10;

/// A frame that no correct node sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a message of kind {kind} is malformed")]
pub struct Malformed {
    /// Its kind.
    pub kind: u8,
}

const HELLO: u8 = 1;
const EVENT: u8 = 2;
const ROUTING: u8 = 3;
const END_OF_INTERRUPT: u8 = 4;
const ACCESS: u8 = 5;
const ANSWER: u8 = 6;
const START: u8 = 7;
const STARTED: u8 = 8;
const PAUSE: u8 = 9;
const PAUSED: u8 = 10;
const RESUME: u8 = 11;
const END: u8 = 12;
const ENDED: u8 = 13;
const ALIVE: u8 = 14;
const REPORT: u8 = 15;
const CLOCK_ASK: u8 = 16;
const CLOCK_ANSWER: u8 = 17;
const MOVE: u8 = 18;
const MOVED: u8 = 19;
const VCPU: u8 = 20;
const ARRIVED: u8 = 21;

/// The codes of events; those of interrupts carry their trigger.
const EDGE: u8 = 0;
const LEVEL: u8 = 1;
const NMI: u8 = 2;
const INIT: u8 = 3;
const STARTUP: u8 = 4;

/// Appends the frame of a message.
pub(crate) fn encode(message: &Message, to: &mut Vec<u8>) {
    let start = to.len();
    to.extend([0, 0]);
    match message {
        Message::Hello { version, vm, node } => {
            to.push(HELLO);
            to.extend(version.to_le_bytes());
            to.extend(vm);
            to.push(*node);
        }
        Message::Event { cpu, event } => {
            let (code, value) = match *event {
                Event::Interrupt { vector, trigger } => match trigger {
                    Trigger::Edge => (EDGE, vector),
                    Trigger::Level => (LEVEL, vector),
                },
                Event::Nmi => (NMI, 0),
                Event::Init => (INIT, 0),
                Event::Startup { page } => (STARTUP, page),
            };
            to.extend([EVENT, *cpu, code, value]);
        }
        Message::Routing { call, cpu, routing } => {
            to.push(ROUTING);
            to.extend(call.to_le_bytes());
            to.push(*cpu);
            to.extend(routing.pack().to_le_bytes());
        }
        Message::EndOfInterrupt { vector } => to.extend([END_OF_INTERRUPT, *vector]),
        Message::Access { call, access } => {
            to.push(ACCESS);
            to.extend(call.to_le_bytes());
            to.push(match access.space {
                Space::Ports => 0,
                Space::Memory => 1,
            });
            to.extend(access.address.to_le_bytes());
            to.push(access.len);
            to.extend(access.write.iter().flatten());
        }
        Message::Answer { call, data } => {
            to.push(ANSWER);
            to.extend(call.to_le_bytes());
            to.extend(data);
        }
        Message::Start(values) => {
            to.push(START);
            encode_start(values, to);
        }
        Message::Started => to.push(STARTED),
        Message::Pause { number } => {
            to.push(PAUSE);
            to.extend(number.to_le_bytes());
        }
        Message::Paused { number } => {
            to.push(PAUSED);
            to.extend(number.to_le_bytes());
        }
        Message::Resume => to.push(RESUME),
        Message::Move { cpu, to: node } => to.extend([MOVE, *cpu, *node]),
        Message::Moved {
            call,
            cpu,
            to: node,
        } => {
            to.push(MOVED);
            to.extend(call.to_le_bytes());
            to.extend([*cpu, *node]);
        }
        Message::Vcpu { cpu, state } => {
            to.extend([VCPU, *cpu]);
            // A longer one is cut, and refused by its receiver.
            to.extend(&state[..state.len().min(VCPU_STATE_BYTES_MAX)]);
        }
        Message::Arrived { cpu } => to.extend([ARRIVED, *cpu]),
        Message::End(end) => {
            let (code, text) = match end {
                End::Shutdown => (0, ""),
                End::Reboot => (1, ""),
                End::Stopped => (2, ""),
                End::Crash(text) => (3, text.as_str()),
                End::Failed(text) => (4, text.as_str()),
                End::DonorLost(text) => (5, text.as_str()),
                End::NodeLost { reason, .. } => (6, reason.as_str()),
            };
            to.extend([END, code]);
            if let End::NodeLost { node, .. } = end {
                to.push(*node);
            }
            to.extend(&text.as_bytes()[..text.floor_char_boundary_of(TEXT_BYTES_MAX)]);
        }
        Message::Ended => to.push(ENDED),
        Message::Alive => to.push(ALIVE),
        Message::Report(bytes) => {
            to.push(REPORT);
            // A longer one is cut, and of no use to its receiver.
            to.extend(&bytes[..bytes.len().min(REPORT_BYTES_MAX)]);
        }
        Message::ClockAsk { number } => {
            to.push(CLOCK_ASK);
            to.extend(number.to_le_bytes());
        }
        Message::ClockAnswer { number, ticks } => {
            to.push(CLOCK_ANSWER);
            to.extend(number.to_le_bytes());
            to.extend(ticks.to_le_bytes());
        }
    }
    let len = u16::try_from(to.len() - start - 2).expect("every message is shorter");
    to[start..start + 2].copy_from_slice(&len.to_le_bytes());
}

/// Where a text is cut so that it has at most so many bytes.
trait Cut {
    fn floor_char_boundary_of(&self, most: usize) -> usize;
}

impl Cut for &str {
    fn floor_char_boundary_of(&self, most: usize) -> usize {
        let most = most.min(self.len());
        (0..=most)
            .rev()
            .find(|at| self.is_char_boundary(*at))
            .unwrap_or(0)
    }
}

fn encode_start(values: &Start, to: &mut Vec<u8>) {
    to.extend(
        u16::try_from(values.owners.len())
            .unwrap_or(u16::MAX)
            .to_le_bytes(),
    );
    to.extend(&values.owners);
    to.extend(values.memory_bytes.to_le_bytes());
    to.extend(values.hotplug_bytes.to_le_bytes());
    to.extend(values.tsc_khz.to_le_bytes());
    to.extend(values.tsc_offset.to_le_bytes());
    to.push(u8::from(values.emulated));
    to.push(values.package_id_bits);
    for entry in &values.cpuid {
        let CpuidEntry {
            function,
            index,
            flags,
            eax,
            ebx,
            ecx,
            edx,
        } = *entry;
        for word in [function, index, flags, eax, ebx, ecx, edx] {
            to.extend(word.to_le_bytes());
        }
    }
}

/// The fields that are left of a frame.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, left) = self.0.split_at_checked(count)?;
        self.0 = left;
        Some(taken)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.take(N)?.try_into().ok()
    }

    fn byte(&mut self) -> Option<u8> {
        self.array::<1>().map(|[byte]| byte)
    }

    fn flag(&mut self) -> Option<bool> {
        match self.byte()? {
            0 => Some(false),
            1 => Some(true),
            _ => None,
        }
    }

    fn half(&mut self) -> Option<u16> {
        self.array().map(u16::from_le_bytes)
    }

    fn word(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn long(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }
}

/// The first message in `bytes` and the length of its frame, or `None` when the frame is not there
/// as a whole.
pub(crate) fn decode(bytes: &[u8]) -> Result<Option<(Message, usize)>, Malformed> {
    let mut all = Fields(bytes);
    let Some(len) = all.half() else {
        return Ok(None);
    };
    let Some(frame) = all.take(len.into()) else {
        return Ok(None);
    };
    let mut fields = Fields(frame);
    let kind = fields.byte().ok_or(Malformed { kind: 0 })?;
    let message = decode_fields(kind, &mut fields).filter(|_| fields.0.is_empty());
    let message = message.ok_or(Malformed { kind })?;
    Ok(Some((message, 2 + usize::from(len))))
}

fn decode_fields(kind: u8, fields: &mut Fields<'_>) -> Option<Message> {
    Some(match kind {
        HELLO => Message::Hello {
            version: fields.half()?,
            vm: fields.array()?,
            node: fields.byte()?,
        },
        EVENT => Message::Event {
            cpu: fields.byte()?,
            event: event(fields.byte()?, fields.byte()?)?,
        },
        ROUTING => Message::Routing {
            call: fields.word()?,
            cpu: fields.byte()?,
            routing: Routing::unpack(fields.long()?),
        },
        END_OF_INTERRUPT => Message::EndOfInterrupt {
            vector: fields.byte()?,
        },
        ACCESS => {
            let call = fields.word()?;
            let space = if fields.flag()? {
                Space::Memory
            } else {
                Space::Ports
            };
            let address = fields.long()?;
            let len = fields.byte().filter(|len| (1..=8).contains(len))?;
            let write = match fields.0 {
                [] => None,
                _ => Some(fields.array()?),
            };
            let access = Access {
                space,
                address,
                len,
                write,
            };
            Message::Access { call, access }
        }
        ANSWER => Message::Answer {
            call: fields.word()?,
            data: fields.array()?,
        },
        START => Message::Start(start(fields)?),
        STARTED => Message::Started,
        PAUSE => Message::Pause {
            number: fields.word()?,
        },
        PAUSED => Message::Paused {
            number: fields.word()?,
        },
        RESUME => Message::Resume,
        END => {
            let code = fields.byte()?;
            let lost = match code {
                6 => Some(fields.byte()?),
                _ => None,
            };
            let text = fields
                .take(fields.0.len())
                .filter(|text| text.len() <= TEXT_BYTES_MAX)?;
            let text = std::str::from_utf8(text).ok()?;
            Message::End(match (code, text, lost) {
                (0, "", _) => End::Shutdown,
                (1, "", _) => End::Reboot,
                (2, "", _) => End::Stopped,
                (3, text, _) => End::Crash(text.to_owned()),
                (4, text, _) => End::Failed(text.to_owned()),
                (5, text, _) => End::DonorLost(text.to_owned()),
                (_, text, Some(node)) => End::NodeLost {
                    node,
                    reason: text.to_owned(),
                },
                _ => return None,
            })
        }
        ENDED => Message::Ended,
        ALIVE => Message::Alive,
        REPORT => {
            let bytes = fields.take(fields.0.len())?;
            Message::Report((bytes.len() <= REPORT_BYTES_MAX).then(|| bytes.to_vec())?)
        }
        MOVE => Message::Move {
            cpu: fields.byte()?,
            to: fields.byte()?,
        },
        MOVED => Message::Moved {
            call: fields.word()?,
            cpu: fields.byte()?,
            to: fields.byte()?,
        },
        VCPU => {
            let cpu = fields.byte()?;
            let state = fields.take(fields.0.len())?;
            let state = (state.len() <= VCPU_STATE_BYTES_MAX).then(|| state.to_vec())?;
            Message::Vcpu { cpu, state }
        }
        ARRIVED => Message::Arrived {
            cpu: fields.byte()?,
        },
        CLOCK_ASK => Message::ClockAsk {
            number: fields.word()?,
        },
        CLOCK_ANSWER => Message::ClockAnswer {
            number: fields.word()?,
            ticks: fields.long()?,
        },
        _ => return None,
    })
}

fn event(code: u8, value: u8) -> Option<Event> {
    let interrupt = |trigger| Event::Interrupt {
        vector: value,
        trigger,
    };
    Some(match (code, value) {
        // Also vectors of exceptions, which an I/O APIC sends and a local APIC refuses.
        (EDGE, _) => interrupt(Trigger::Edge),
        (LEVEL, _) => interrupt(Trigger::Level),
        (NMI, 0) => Event::Nmi,
        (INIT, 0) => Event::Init,
        (STARTUP, page) => Event::Startup { page },
        _ => return None,
    })
}

fn start(fields: &mut Fields<'_>) -> Option<Start> {
    let cpus = fields.half()?;
    let mut values = Start {
        owners: fields.take(cpus.into())?.to_vec(),
        memory_bytes: fields.long()?,
        hotplug_bytes: fields.long()?,
        tsc_khz: fields.word()?,
        tsc_offset: fields.long()?,
        emulated: fields.flag()?,
        package_id_bits: fields.byte()?,
        cpuid: Vec::new(),
    };
    while !fields.0.is_empty() {
        values.cpuid.push(CpuidEntry {
            function: fields.word()?,
            index: fields.word()?,
            flags: fields.word()?,
            eax: fields.word()?,
            ebx: fields.word()?,
            ecx: fields.word()?,
            edx: fields.word()?,
        });
    }
    Some(values)
}

#[cfg(test)]
#[path = "codec_tests.rs"]
mod tests;

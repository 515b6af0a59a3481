//! Guests of a few instructions, which even a software KVM runs: for tests.
//!
//! Each is loaded at [`ENTRY`] and does not return. A module per guest has its bytes.

mod elf;

pub use elf::{ENTRY, elf};

/// Assembles a guest into a module whose function `code` gives its bytes. Macros of the assembler
/// are there for all guests: `say`, `power_off` and `walk`, and for disks `start_disk` and `ask_disk`.
macro_rules! guest {
    ($name:ident, $($line:literal),+ $(,)?) => {
        #[doc = concat!("The guest `", stringify!($name), "`.")]
        pub mod $name {
            std::arch::global_asm!(
                ".pushsection .rodata",
                // The code that asks for them may be in another object file.
                concat!(".globl ", stringify!($name), "_start"),
                concat!(".globl ", stringify!($name), "_end"),
                concat!(stringify!($name), "_start:"),
                // Writes the byte to the serial port.
                ".macro say byte",
                "mov dx, 0x3f8",
                "mov al, \\byte",
                "out dx, al",
                ".endm",
                // Sleeps in S5: SLP_TYP 5 and SLP_EN to the PM1 control register.
                ".macro power_off",
                "mov dx, 0x604",
                "mov ax, 0x3400",
                "out dx, ax",
                ".endm",
                // Brings up the virtio device with these registers, its queue 0 in these pages.
                ".macro start_disk registers, rings",
                "mov edi, \\registers",
                "mov dword ptr [rdi + 0x70], 0",
                "mov dword ptr [rdi + 0x70], 1",
                "mov dword ptr [rdi + 0x70], 3",
                "mov dword ptr [rdi + 0x24], 1",
                "mov dword ptr [rdi + 0x20], 1",
                "mov dword ptr [rdi + 0x70], 11",
                "mov dword ptr [rdi + 0x30], 0",
                "mov dword ptr [rdi + 0x38], 8",
                "mov dword ptr [rdi + 0x80], \\rings",
                "mov dword ptr [rdi + 0x90], \\rings + 0x1000",
                "mov dword ptr [rdi + 0xa0], \\rings + 0x2000",
                "mov dword ptr [rdi + 0x44], 1",
                "mov dword ptr [rdi + 0x70], 15",
                ".endm",
                // Request `number`, from 1 on, about sector 0: 0 reads it and 1 writes it. Header and
                // status are in the page of the descriptors; `flags` are those of the data.
                ".macro ask_disk registers, rings, data, kind=0, flags=3, number=1",
                "mov esi, \\rings",
                "mov dword ptr [rsi + 0x800], \\kind",
                "mov dword ptr [rsi], \\rings + 0x800",
                "mov dword ptr [rsi + 8], 16",
                "mov dword ptr [rsi + 12], 0x10001",
                "mov dword ptr [rsi + 16], \\data",
                "mov dword ptr [rsi + 24], 512",
                "mov dword ptr [rsi + 28], 0x20000 + \\flags",
                "mov dword ptr [rsi + 32], \\rings + 0x900",
                "mov dword ptr [rsi + 40], 1",
                "mov dword ptr [rsi + 44], 2",
                "mov word ptr [rsi + 0x1002], \\number",
                "mov edi, \\registers",
                "mov dword ptr [rdi + 0x50], 0",
                ".endm",
                // Counts in a word of each page between 2 and 48 MiB.
                ".macro walk",
                "mov rbx, 0x200000",
                "91: inc qword ptr [rbx]",
                "add rbx, 0x1000",
                "cmp rbx, 0x3000000",
                "jb 91b",
                ".endm",
                $($line,)+
                ".purgem walk",
                ".purgem say",
                ".purgem power_off",
                ".purgem start_disk",
                ".purgem ask_disk",
                concat!(stringify!($name), "_end:"),
                ".popsection",
            );
            unsafe extern "C" {
                #[link_name = concat!(stringify!($name), "_start")]
                static START: u8;
                #[link_name = concat!(stringify!($name), "_end")]
                static END: u8;
            }
            /// Its bytes.
            pub fn code() -> &'static [u8] {
                let (start, end) = (&raw const START, &raw const END);
                // SAFETY: the two labels enclose the guest's bytes in one section of read-only
                // data, which lives as long as the program.
                unsafe { std::slice::from_raw_parts(start, end.byte_offset_from_unsigned(start)) }
            }
        }
    };
}

guest!(
    hello,
    "lea rsi, [rip + 3f]",
    "mov ecx, 6",
    "mov dx, 0x3f8",
    "rep outsb",
    "power_off",
    "2: hlt",
    "jmp 2b",
    "3: .ascii \"hello\\n\"",
);
guest!(
    report_free_pages,
    // The first virtio device, if it is one.
    "mov edi, 0xd0000000",
    "mov eax, [rdi]",
    "cmp eax, 0x74726976",
    "jne 4f",
    // Status and features: version 1, free page reporting.
    "mov dword ptr [rdi + 0x70], 0",
    "mov dword ptr [rdi + 0x70], 1",
    "mov dword ptr [rdi + 0x70], 3",
    "mov dword ptr [rdi + 0x24], 1",
    "mov dword ptr [rdi + 0x20], 1",
    "mov dword ptr [rdi + 0x24], 0",
    "mov dword ptr [rdi + 0x20], 0x20",
    "mov dword ptr [rdi + 0x70], 11",
    // Queue 2, 32 places.
    "mov dword ptr [rdi + 0x30], 2",
    "mov dword ptr [rdi + 0x38], 32",
    "mov dword ptr [rdi + 0x80], 0x210000",
    "mov dword ptr [rdi + 0x90], 0x211000",
    "mov dword ptr [rdi + 0xa0], 0x212000",
    "mov dword ptr [rdi + 0x44], 1",
    "mov dword ptr [rdi + 0x70], 15",
    // One descriptor: two pages at 3 MiB, for the device to write.
    "mov esi, 0x210000",
    "mov dword ptr [rsi], 0x300000",
    "mov dword ptr [rsi + 8], 0x2000",
    "mov word ptr [rsi + 12], 2",
    "mov esi, 0x211000",
    "mov word ptr [rsi + 2], 1",
    "mov dword ptr [rdi + 0x50], 2",
    // Until it is used and the device interrupts.
    "mov esi, 0x212000",
    "2: pause",
    "cmp word ptr [rsi + 2], 1",
    "jne 2b",
    "3: mov eax, [rdi + 0x60]",
    "test eax, eax",
    "jz 3b",
    "say 'f'",
    "power_off",
    "4: say '?'",
    "power_off",
    "5: jmp 5b",
);
guest!(
    reset_register,
    "mov dx, 0xcf9",
    "mov al, 6",
    "out dx, al",
    "2: jmp 2b"
);
guest!(keyboard_reset, "mov al, 0xfe", "out 0x64, al", "2: jmp 2b");
guest!(triple_fault, "nop", "ud2");
guest!(
    init_reached,
    "mov dx, 0x5f4",
    "mov al, 0x7b",
    "out dx, al",
    "power_off",
    "2: jmp 2b"
);
guest!(
    unknown_port,
    "mov dx, 0x1234",
    "in eax, dx",
    "mov dx, 0x3f8",
    "out dx, eax",
    "power_off",
    "2: jmp 2b",
);
// Says `1` if its time stamp counter ticks at one rate whatever the power state, else `0`.
guest!(
    is_tsc_invariant,
    "mov eax, 0x80000007",
    "cpuid",
    "bt edx, 8",
    "mov al, 0x30",
    "adc al, 0",
    "mov dx, 0x3f8",
    "out dx, al",
    "power_off",
    "2: jmp 2b",
);
guest!(
    count_for_ever,
    "say 'r'",
    "mov rbx, 0x200000",
    "2: inc qword ptr [rbx]",
    "jmp 2b",
);
// Counts in a word of each page between 2 and 48 MiB, round after round.
guest!(walk_for_ever, "say 'r'", "2: walk", "jmp 2b",);
// The same, and says 64 bytes for each page.
guest!(
    talk_and_walk,
    "say 'r'",
    "mov dx, 0x3f8",
    "2: mov rbx, 0x200000",
    "3: inc qword ptr [rbx]",
    "mov rsi, rbx",
    "mov ecx, 64",
    "rep outsb",
    "add rbx, 0x1000",
    "cmp rbx, 0x3000000",
    "jb 3b",
    "jmp 2b",
);
// Waits for its power button. Then counts as `walk_for_ever` does, and after each round reads six pages at each of
// 1500 random places; when the button was pressed once more it reboots.
guest!(
    wander,
    "mov dx, 0x602",
    "mov ax, 0x100",
    "out dx, ax",
    "say 'r'",
    "mov dx, 0x600",
    "6: in ax, dx",
    "test ah, 1",
    "jz 6b",
    // What is written as 1 is cleared.
    "out dx, ax",
    "mov r9, 1",
    "mov r10, 0x5851f42d4c957f2d",
    "2: walk",
    "mov ecx, 1500",
    // The upper half of a linear congruence, of the pages that are not the last five.
    "3: imul r9, r10",
    "inc r9",
    "mov rax, r9",
    "shr rax, 32",
    "imul rax, rax, 11771",
    "shr rax, 32",
    "shl rax, 12",
    "lea rbx, [rax + 0x200000]",
    "mov edx, 6",
    "4: mov rax, [rbx]",
    "add rbx, 0x1000",
    "dec edx",
    "jnz 4b",
    "dec ecx",
    "jnz 3b",
    "mov dx, 0x600",
    "in ax, dx",
    "test ah, 1",
    "jz 2b",
    "mov dx, 0xcf9",
    "mov al, 6",
    "out dx, al",
    "5: jmp 5b",
);
// Counts as `walk_for_ever` does, until its power button is pressed, to which it listens.
guest!(
    walk_until_power_button,
    "mov dx, 0x602",
    "mov ax, 0x100",
    "out dx, ax",
    "say 'r'",
    "2: walk",
    "mov dx, 0x600",
    "in ax, dx",
    "test ah, 1",
    "jz 2b",
    "say 'b'",
    "power_off",
    "4: hlt",
    "jmp 4b",
);
guest!(halt_for_ever, "say 'h'", "2: hlt", "jmp 2b");
guest!(talk_for_ever, "2: say 'x'", "jmp 2b");
guest!(
    walk_and_check,
    "say 'r'",
    "mov ecx, 3",
    "2: walk",
    "dec ecx",
    "jnz 2b",
    // Each word has been counted up three times, whatever host its page was on meanwhile.
    "mov rbx, 0x200000",
    "3: cmp qword ptr [rbx], 3",
    "jne 5f",
    "add rbx, 0x1000",
    "cmp rbx, 0x3000000",
    "jb 3b",
    "say 'k'",
    "4: power_off",
    "hlt",
    "jmp 4b",
    "5: say '!'",
    "jmp 4b",
);
guest!(
    echo_until_q,
    "say '>'",
    "2: mov dx, 0x3fd",
    "in al, dx",
    "test al, 1",
    "jz 2b",
    "mov dx, 0x3f8",
    "in al, dx",
    "out dx, al",
    "cmp al, 'q'",
    "jne 2b",
    "power_off",
    "3: jmp 3b",
);
guest!(
    second_cpu,
    // The second CPU starts in real mode at 0x8000: put its code there.
    "lea rsi, [rip + 4f]",
    "mov rdi, 0x8000",
    "mov ecx, 32",
    "rep movsb",
    // Enable the local APIC; INIT, then start-up with page 8, to APIC 1.
    "mov rbx, 0xfee00000",
    "mov dword ptr [rbx + 0xf0], 0x1ff",
    "mov dword ptr [rbx + 0x310], 0x01000000",
    "mov dword ptr [rbx + 0x300], 0x4500",
    "mov dword ptr [rbx + 0x310], 0x01000000",
    "mov dword ptr [rbx + 0x300], 0x4608",
    "mov rbx, 0x8f00",
    "2: cmp byte ptr [rbx], 1",
    "jne 2b",
    "say 'B'",
    "power_off",
    "3: jmp 3b",
    "4:",
    ".code16",
    "mov dx, 0x3f8",
    "mov al, 'A'",
    "out dx, al",
    "xor ax, ax",
    "mov ds, ax",
    "mov byte ptr [0x8f00], 1",
    "5: hlt",
    "jmp 5b",
    ".code64",
    ".skip 16",
);
guest!(
    touch_absent_page,
    "mov rbx, 0x300000",
    "mov al, [rbx]",
    "power_off",
    "2: jmp 2b",
);

guest!(run_where_no_memory_is, "mov rax, 0xd0000000", "jmp rax");
// Reads the first sector of two disks: of the first into a page at 0x3f0000, of the second into
// one at 0x300000. Says the first byte of each, the second disk's before that of the first.
guest!(
    read_two_disks,
    "start_disk 0xd0000000, 0x210000",
    "start_disk 0xd0001000, 0x220000",
    "ask_disk 0xd0000000, 0x210000, 0x3f0000",
    "ask_disk 0xd0001000, 0x220000, 0x300000",
    "mov esi, 0x222000",
    "2: pause",
    "cmp word ptr [rsi + 2], 1",
    "jne 2b",
    "mov rbx, 0x300000",
    "mov al, [rbx]",
    "mov dx, 0x3f8",
    "out dx, al",
    "mov esi, 0x212000",
    "3: pause",
    "cmp word ptr [rsi + 2], 1",
    "jne 3b",
    "mov rbx, 0x3f0000",
    "mov al, [rbx]",
    "out dx, al",
    "power_off",
    "4: jmp 4b",
);
// Says the first byte of the disk, and one more when its memory is not new. Unless the byte is a
// `c` it writes the next letter there, and reboots.
guest!(
    reboot_until_c,
    "start_disk 0xd0000000, 0x210000",
    "ask_disk 0xd0000000, 0x210000, 0x300000",
    "mov esi, 0x212000",
    "2: pause",
    "cmp word ptr [rsi + 2], 1",
    "jne 2b",
    "mov rbx, 0x300000",
    "mov al, [rbx]",
    "mov dx, 0x3f8",
    "out dx, al",
    "mov rbx, 0x3f0000",
    "cmp byte ptr [rbx], 0",
    "je 3f",
    "say '!'",
    "3: mov byte ptr [rbx], 1",
    "mov rbx, 0x300000",
    "cmp byte ptr [rbx], 'c'",
    "je 5f",
    "inc byte ptr [rbx]",
    "ask_disk 0xd0000000, 0x210000, 0x300000, 1, 1, 2",
    "mov esi, 0x212000",
    "4: pause",
    "cmp word ptr [rsi + 2], 2",
    "jne 4b",
    "mov dx, 0xcf9",
    "mov al, 6",
    "out dx, al",
    "5: power_off",
    "6: jmp 6b",
);
// Does what the init of `--exec` does: says hello on the second serial port, three bytes of output,
// two of errors, and the status 42.
guest!(
    exec_result,
    "lea rsi, [rip + 3f]",
    "mov ecx, 31",
    "mov dx, 0x2f8",
    "rep outsb",
    "power_off",
    "2: hlt",
    "jmp 2b",
    "3: .ascii \"\\000SSI-HV exec 1\\n\\000\"",
    ".ascii \"o\\003\\000a\\000\\377e\\002\\000b\\ns\\001\\000\\052\"",
);
// The same, but it does not switch itself off.
guest!(
    exec_and_stay,
    "lea rsi, [rip + 3f]",
    "mov ecx, 31",
    "mov dx, 0x2f8",
    "rep outsb",
    "2: hlt",
    "jmp 2b",
    "3: .ascii \"\\000SSI-HV exec 1\\n\\000\"",
    ".ascii \"o\\003\\000a\\000\\377e\\002\\000b\\ns\\001\\000\\052\"",
);
// Hello, and something that is no frame.
guest!(
    exec_garbled,
    "lea rsi, [rip + 3f]",
    "mov ecx, 19",
    "mov dx, 0x2f8",
    "rep outsb",
    "2: hlt",
    "jmp 2b",
    "3: .ascii \"\\000SSI-HV exec 1\\n\\000???\"",
);
// Tells of its panic on the console, and by the port for that.
guest!(
    panics,
    "lea rsi, [rip + 3f]",
    "mov ecx, 39",
    "mov dx, 0x3f8",
    "rep outsb",
    "mov dx, 0x505",
    "mov al, 1",
    "out dx, al",
    "2: hlt",
    "jmp 2b",
    "3: .ascii \"[ 1.0] Kernel panic - not syncing: boom\"",
);
// Uses XSAVE and AVX in steps, and says a letter after each, so that the last letter names the step
// before the one that a processor cannot do. Always: `x` when CPUID offers XSAVE (else `n` and the
// end), `o` when CR4 enables it, `s` for XSETBV with the state of x87, SSE and AVX. Of the others those
// whose bits are in the byte at 0x208000: 1 `g` XGETBV reads that again; 2 `l` leaf 0xd has the size of
// that state; 4 `a` an AVX register is loaded; 8 `v` XSAVE; 16 `r` XRSTOR of a register that was
// cleared. At the end `k` if memory has the whole register where AVX was used; `w` where something is wrong.
guest!(
    save_state,
    "mov eax, 1",
    "xor ecx, ecx",
    "cpuid",
    "bt ecx, 26",
    "jc 2f",
    "say 'n'",
    "power_off",
    "9: jmp 9b",
    "2: say 'x'",
    // CR0: no emulation, no task switch, monitor. CR4: OSFXSR and OSXSAVE.
    "mov rax, cr0",
    "and eax, 0xfffffff3",
    "or eax, 2",
    "mov cr0, rax",
    "mov rax, cr4",
    "or eax, 0x40200",
    "mov cr4, rax",
    "say 'o'",
    "xor ecx, ecx",
    "xor edx, edx",
    "mov eax, 7",
    "xsetbv",
    "say 's'",
    "mov ebp, 0x208000",
    "test byte ptr [rbp], 1",
    "jz 2f",
    "xor ecx, ecx",
    "xgetbv",
    "cmp eax, 7",
    "jne 8f",
    "say 'g'",
    // The legacy region and the header of 576 bytes, and 16 bytes of each of 16 registers.
    "2: test byte ptr [rbp], 2",
    "jz 2f",
    "mov eax, 0xd",
    "xor ecx, ecx",
    "cpuid",
    "cmp ebx, 832",
    "jne 8f",
    "say 'l'",
    "2: test byte ptr [rbp], 4",
    "jz 7f",
    "mov esi, 0x210000",
    "mov rax, 0x0123456789abcdef",
    "mov [rsi], rax",
    "mov [rsi + 24], rax",
    "vmovdqu ymm3, [rsi]",
    "say 'a'",
    "mov edi, 0x220000",
    "test byte ptr [rbp], 8",
    "jz 2f",
    "mov eax, 7",
    "xor edx, edx",
    "xsave64 [rdi]",
    "say 'v'",
    "2: test byte ptr [rbp], 16",
    "jz 2f",
    "vxorps ymm3, ymm3, ymm3",
    "mov eax, 7",
    "xor edx, edx",
    "xrstor64 [rdi]",
    "say 'r'",
    "2: vmovdqu [rsi + 64], ymm3",
    "mov rax, [rsi]",
    "cmp rax, [rsi + 64]",
    "jne 8f",
    "mov rax, [rsi + 24]",
    "cmp rax, [rsi + 64 + 24]",
    "jne 8f",
    "say 'k'",
    "7: power_off",
    "9: jmp 9b",
    "8: say 'w'",
    "power_off",
    "9: jmp 9b",
);
